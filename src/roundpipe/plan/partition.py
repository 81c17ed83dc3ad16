"""Cuts a row of layers into stages. Pure functions over numbers; bytes or milliseconds, that is the caller's choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Per layer: forward cost, cost of recompute plus backward (or of a fused visit), and weight bytes."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_bytes: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.forward)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Forward stages ascending over ``[0, a)``, then backward stages descending; the first backward stage is fused."""

    forward: tuple[range, ...]
    backward: tuple[range, ...]


def pack_layers(costs: Sequence[float], limit: float) -> list[range]:
    """Fewest consecutive stages whose cost stays within ``limit``; a single layer above it gets a stage of its own."""
    stages: list[range] = []
    start, total = 0, 0.0
    for layer, cost in enumerate(costs):
        if layer > start and total + cost > limit:
            stages.append(range(start, layer))
            start, total = layer, 0.0
        total += cost
    if costs:
        stages.append(range(start, len(costs)))
    return stages


def partition_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """At most ``num_stages`` consecutive stages with the smallest possible largest cost.

    The largest cost of an optimal cut is the sum of some run of layers, so those sums are the only limits to try.
    """
    sums = [0.0, *accumulate(costs)]
    limits = sorted({sums[j] - sums[i] for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, limits[middle], num_stages):
            high = middle
        else:
            low = middle + 1
    return pack_layers(costs, limits[low]) if limits else []


def _fits(costs: Sequence[float], limit: float, num_stages: int) -> bool:
    return max(costs) <= limit and len(pack_layers(costs, limit)) <= num_stages


def plan_fused(
    costs: LayerCosts, *, num_devices: int, num_microbatches: int, min_stages: int, max_stage_bytes: float
) -> Stages:
    """The cut with the smallest predicted round: ``(M * S + N * (N - 1)) * slowest stage``.

    S stages in all, M microbatches, N devices. One device and enough memory therefore gives one fused stage, in which
    nothing is recomputed; several devices give as many stages as balance them.
    """
    best: tuple[float, Stages] | None = None
    for num_backward in range(1, costs.num_layers + 1):
        stages = _cut(costs, num_backward, max_stage_bytes)
        count = len(stages.forward) + len(stages.backward)
        if count < min_stages and num_backward < costs.num_layers:
            continue
        slowest = max(
            [sum(costs.forward[i] for i in stage) for stage in stages.forward]
            + [sum(costs.backward[i] for i in stage) for stage in stages.backward]
        )
        predicted = (num_microbatches * count + num_devices * (num_devices - 1)) * slowest
        if best is None or predicted < best[0]:
            best = (predicted, stages)
    assert best is not None
    return best[1]


def _cut(costs: LayerCosts, num_backward: int, max_stage_bytes: float) -> Stages:
    backward = _within_bytes(partition_layers(costs.backward, num_backward), costs, max_stage_bytes)
    slowest = max(sum(costs.backward[i] for i in stage) for stage in backward)
    head = backward[-1].start
    forward = _within_bytes(pack_layers(costs.forward[:head], slowest), costs, max_stage_bytes)
    return Stages(forward=tuple(forward), backward=tuple(reversed(backward)))


def _within_bytes(stages: list[range], costs: LayerCosts, max_stage_bytes: float) -> list[range]:
    pieces = []
    for stage in stages:
        for piece in pack_layers([costs.weight_bytes[i] for i in stage], max_stage_bytes):
            pieces.append(range(stage.start + piece.start, stage.start + piece.stop))
    return pieces
