"""Cuts for several models that run one after another on the same devices, with stages about equally
slow."""

from collections.abc import Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from .actions import Pass, Passes
from .costs import LayerCosts, StageSums, Workload
from .memory import PeakBytes, least_peak, nothing_fits, stage_limits, stage_needs
from .partition import even_limits, pack_within, partition_layers


class Member(NamedTuple):
    """One of the models. ``has_backward``: it runs backward too; ``is_fused``: its last
    layers in one stage run."""

    costs: LayerCosts
    workload: Workload
    has_backward: bool
    is_fused: bool


class _Cut(NamedTuple):
    """Layers per stage from the first layer up; ``fused`` is 0 where there is no fused stage."""

    forward: list[range]
    fused: int
    backward: list[range]

    def passes(self, num_layers: int) -> Passes:
        fused = [(Pass.FUSED, range(num_layers - self.fused, num_layers))] if self.fused else []
        backward = [(Pass.BACKWARD, stage) for stage in reversed(self.backward)]
        return [*((Pass.FORWARD, stage) for stage in self.forward), *fused, *backward]


def plan_together(
    members: Sequence[Member], *, min_stages: int, upper_threshold: float
) -> list[Passes]:
    """Every model's stage runs.

    The target is the slowest stage that makes ``(M * S + N * (N - 1)) * slowest`` smallest, S
    counting the stages of all models, because one slow stage anywhere holds up all others. A model
    gets as many stages as it needs when they may be ``upper_threshold`` times as slow as the
    target, as equal as they can be.

    Raises:
        PlanError: a model does not fit into its limit.
    """
    totals = [StageSums(member.costs) for member in members]
    limits = {
        limit
        for total in totals
        for times in (total.forward, total.again)
        for limit in even_limits(times)
    }
    _, target, limit = min(
        (*_together_ms(members, totals, limit, min_stages), limit) for limit in {*limits, 0.0}
    )
    evened = _all_evened(members, totals, target * upper_threshold)
    return evened if sum(map(len, evened)) >= min_stages else _all_evened(members, totals, limit)


def _all_evened(
    members: Sequence[Member], totals: Sequence[StageSums], limit: float
) -> list[Passes]:
    return [
        _evened(member, total, limit, f"model {number} of {len(members)}: ")
        for number, (member, total) in enumerate(zip(members, totals, strict=True), 1)
    ]


def _together_ms(
    members: Sequence[Member], totals: Sequence[StageSums], limit: float, min_stages: int
) -> tuple[float, float]:
    """The predicted time, infinite with too few stages, and the slowest stage."""
    work, slowest, num_stage_runs, num_devices = 0, 0.0, 0, 1
    for member, total in zip(members, totals, strict=True):
        stage_runs = _cut(member, total, limit).passes(member.costs.num_layers)
        num_stage_runs += len(stage_runs)
        num_devices = max(num_devices, member.workload.num_devices)
        work += member.workload.num_microbatches * len(stage_runs)
        slowest = max(
            slowest,
            *(
                total.stage_run_ms(*stage_run, member.workload.num_microbatches)
                for stage_run in stage_runs
            ),
        )
    is_enough = num_stage_runs >= min_stages or limit == 0
    return ((work + num_devices * (num_devices - 1)) * slowest if is_enough else inf), slowest


def _cut(member: Member, total: StageSums, limit: float) -> _Cut:
    num_layers = member.costs.num_layers
    fused = 0
    if member.is_fused:
        whole = total.fused[num_layers]
        fused = max(
            n
            for n in range(1, num_layers + 1)
            if n == 1 or whole - total.fused[num_layers - n] <= limit
        )
    start = min(member.workload.first_trained, num_layers - 1)
    return _Cut(
        forward=pack_within([(total.forward, limit)], 0, num_layers - fused),
        fused=fused,
        backward=pack_within([(total.again, limit)], start, num_layers - fused)
        if member.has_backward
        else [],
    )


def _evened(member: Member, total: StageSums, limit: float, name: str) -> Passes:
    """As many stages as ``limit`` asks for, evened out, and cut further as far as memory asks for
    it."""
    cut, workload, num_layers = _cut(member, total, limit), member.workload, member.costs.num_layers
    start = min(workload.first_trained, num_layers - 1)
    again = [r + b for r, b in zip(member.costs.recompute, member.costs.backward, strict=True)]
    needs = stage_needs(member.costs, workload)
    smallest: PeakBytes | None = None
    for fused, stage_bytes in product(
        range(cut.fused, min(cut.fused, 1) - 1, -1), stage_limits(workload)
    ):
        forward = _even(member.costs.forward, 0, num_layers - fused, len(cut.forward))
        backward = (
            _even(again, start, num_layers - fused, len(cut.backward))
            if member.has_backward
            else []
        )
        passes = _Cut(
            forward=_within(needs[Pass.FORWARD], stage_bytes, forward),
            fused=fused,
            backward=_within(needs[Pass.BACKWARD], stage_bytes, backward),
        ).passes(num_layers)
        peak = least_peak(passes, total, workload)
        smallest = peak if smallest is None or peak.total < smallest.total else smallest
        if peak.total <= workload.limit_bytes:
            return passes
    raise nothing_fits(
        member.costs, workload, smallest, has_backward=member.has_backward, model=name
    )


def _even(costs: Sequence[float], start: int, stop: int, num_stages: int) -> list[range]:
    stages = partition_layers(costs[start:stop], max(num_stages, 1))
    return [range(start + stage.start, start + stage.stop) for stage in stages]


def _within(needs: Sequence[float], stage_bytes: float, stages: list[range]) -> list[range]:
    return [
        piece
        for stage in stages
        for piece in pack_within([(needs, stage_bytes)], stage.start, stage.stop)
    ]
