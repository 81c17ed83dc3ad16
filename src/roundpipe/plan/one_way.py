"""Cuts for rounds of one direction: inference, and forward and backward apart when a user's graph lies between them."""

from collections.abc import Iterator
from itertools import product

from .actions import Pass, Passes
from .costs import LayerCosts, Round, StageSums
from .memory import PeakBytes, least_peak, nothing_fits, stage_limits, stage_needs
from .partition import even_limits, pack_within
from .predict import round_ms
from .search import VISIT_TAX


def plan_one_way(pass_: Pass, costs: LayerCosts, round_: Round, before: Passes | None = None) -> tuple[range, ...]:
    """The stages of a round in the order of its visits: the shortest round among evenly packed cuts that fit.

    ``before``: the visits of the forward round whose saved inputs a backward round finds on the devices.

    Raises:
        PlanError: no cut fits into the budget.
    """
    totals = StageSums(costs)
    least: PeakBytes | None = None
    for stage_bytes in stage_limits(round_):
        best: tuple[float, tuple[range, ...]] | None = None
        for stages in _cuts(pass_, totals, round_, stage_bytes):
            visits: Passes = [(pass_, layers) for layers in stages]
            ms = round_ms([totals.visit_ms(*visit, round_.num_microbatches) for visit in visits], round_)
            ms *= 1 + VISIT_TAX * len(stages)
            if best is not None and ms >= best[0]:
                continue
            peak = least_peak([*(before or []), *visits], totals, round_)
            least = peak if least is None or peak.total < least.total else least
            if peak.total <= round_.budget_bytes:
                best = ms, stages
        if best is not None:
            return best[1]
    raise nothing_fits(costs, round_, least, has_backward=pass_ is not Pass.FORWARD)


def _cuts(pass_: Pass, totals: StageSums, round_: Round, stage_bytes: float) -> Iterator[tuple[range, ...]]:
    """With and without a ramp at the first layers, where a forward round begins and a backward round ends."""
    num_layers = totals.costs.num_layers
    times = totals.forward if pass_ is Pass.FORWARD else totals.again
    start = 0 if pass_ is Pass.FORWARD else min(round_.first_trained, num_layers - 1)
    held = (stage_needs(totals.costs, round_)[pass_], stage_bytes)
    for limit, ramp in product([0.0, *even_limits(times)], sorted({0, round_.num_devices})):
        stages = pack_within([(times, limit), held], start, num_layers, ramp=ramp)
        if len(stages) >= min(round_.min_stages, num_layers - start):
            yield tuple(stages) if pass_ is Pass.FORWARD else tuple(reversed(stages))
