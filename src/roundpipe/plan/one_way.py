"""Cuts for rounds of one direction: inference, and forward and backward apart when a user's graph
lies between them."""

from collections.abc import Iterator
from itertools import product

from .actions import Pass, Passes
from .costs import LayerCosts, StageSums, Workload
from .memory import PeakBytes, least_peak, nothing_fits, stage_limits, stage_needs
from .partition import even_limits, pack_within
from .predict import round_ms
from .search import STAGE_RUN_TAX


def plan_one_way(
    pass_: Pass, costs: LayerCosts, workload: Workload, before: Passes | None = None
) -> tuple[range, ...]:
    """The stages of a round in the order of its stage runs: the shortest round among evenly packed
    cuts that fit.

    ``before``: the stage runs of the forward round whose saved inputs a backward round finds on the
    devices.

    Raises:
        PlanError: no cut fits into the limit.
    """
    totals = StageSums(costs)
    least: PeakBytes | None = None
    for stage_bytes in stage_limits(workload):
        best: tuple[float, tuple[range, ...]] | None = None
        for stages in _cuts(pass_, totals, workload, stage_bytes):
            stage_runs: Passes = [(pass_, layers) for layers in stages]
            ms = round_ms(
                [
                    totals.stage_run_ms(*stage_run, workload.num_microbatches)
                    for stage_run in stage_runs
                ],
                workload,
            )
            ms *= 1 + STAGE_RUN_TAX * len(stages)
            if best is not None and ms >= best[0]:
                continue
            peak = least_peak([*(before or []), *stage_runs], totals, workload)
            least = peak if least is None or peak.total < least.total else least
            if peak.total <= workload.limit_bytes:
                best = ms, stages
        if best is not None:
            return best[1]
    raise nothing_fits(costs, workload, least, has_backward=pass_ is not Pass.FORWARD)


def _cuts(
    pass_: Pass, totals: StageSums, workload: Workload, stage_bytes: float
) -> Iterator[tuple[range, ...]]:
    """With and without a ramp at the first layers, where a forward round begins and a backward
    round ends."""
    num_layers = totals.costs.num_layers
    times = totals.forward if pass_ is Pass.FORWARD else totals.again
    start = 0 if pass_ is Pass.FORWARD else min(workload.first_trained, num_layers - 1)
    held = (stage_needs(totals.costs, workload)[pass_], stage_bytes)
    for limit, ramp in product([0.0, *even_limits(times)], sorted({0, workload.num_devices})):
        stages = pack_within([(times, limit), held], start, num_layers, ramp=ramp)
        if len(stages) >= min(workload.min_stages, num_layers - start):
            yield tuple(stages) if pass_ is Pass.FORWARD else tuple(reversed(stages))
