"""What a plan needs at most on one device. Counts what the engine holds; workspace of kernels is not known here.

[Note: device memory] Four things share a device:

* *slots*: the weights of the visit that runs and of the device's next one, already on its way up. Slots are kept by
  size (memory/slots.py), so a size counts with the most layers of it ever held at once.
* *graph*: what autograd keeps of one microbatch, for the layers whose backward runs at once: the whole stage, or with
  grain "layer" one layer, beside the inputs of the others. And the largest gradient that passes through a layer.
* *sums*: gradient accumulators of the visit, and of the device's visit before it, which are still going down.
* *boundaries*: inputs kept for backward visits, and tensors on their way to the next visit, for all microbatches.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from .actions import Pass, Passes
from .costs import LayerCosts, Round, StageSums, sums

# What a single stage may take of a budget that it shares with prefetched weights and boundaries: loosest first.
_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)


class PeakBytes(NamedTuple):
    """The fullest moment of the fullest device."""

    slots: int
    graph: int
    sums: int
    boundaries: int

    @property
    def total(self) -> int:
        return self.slots + self.graph + self.sums + self.boundaries

    def __str__(self) -> str:
        parts = (f"{name} {readable(value)}" for name, value in self._asdict().items())
        return f"{readable(self.total)} ({', '.join(parts)})"


def readable(num_bytes: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def predicted_peak_bytes(passes: Passes, costs: LayerCosts, round_: Round) -> int:
    """The most that one device holds at once, see [Note: device memory]."""
    return predicted_peak(passes, StageSums(costs), round_).total


def predicted_peak(passes: Passes, stages: StageSums, round_: Round) -> PeakBytes:
    """``predicted_peak_bytes`` by kind, over sums that the caller already has."""
    slots = _slot_bytes([layers for _, layers in passes], stages.costs.weight_bytes, round_.num_devices)
    landing = [_sums(visit, stages, round_) for visit in passes]
    boundaries = _boundaries(passes, stages.costs, round_)
    moments = []
    for visit, parts in enumerate(passes):
        before = landing[visit - round_.num_devices] if visit >= round_.num_devices else 0
        moments.append(
            PeakBytes(slots, graph_bytes(*parts, stages, round_), landing[visit] + before, boundaries[visit])
        )
    return max(moments, key=lambda moment: moment.total)


def graph_bytes(pass_: Pass, layers: range, stages: StageSums, round_: Round) -> int:
    """What autograd keeps of one microbatch in a visit."""
    start = max(layers.start, min(round_.first_trained, layers.stop))
    if pass_ is Pass.FORWARD or start == layers.stop:
        return 0
    passing = max(stages.costs.passing_bytes[start : layers.stop])
    if pass_ is Pass.BACKWARD and round_.grain == "layer":
        inner = stages.inputs[layers.stop] - stages.inputs[start + 1]
        return int(max(stages.costs.saved_bytes[start : layers.stop]) + inner) + passing
    return int(stages.saved[layers.stop] - stages.saved[start]) + passing


def _sums(visit: tuple[Pass, range], stages: StageSums, round_: Round) -> int:
    pass_, layers = visit
    if pass_ is Pass.FORWARD:
        return 0
    return int(stages.gradients[layers.stop] - stages.gradients[layers.start])


@lru_cache(maxsize=8)
def _layers_of_size(weight_bytes: tuple[int, ...]) -> list[tuple[int, list[float]]]:
    """Every size of slot with running counts of its layers."""
    return [(size, sums([own == size for own in weight_bytes])) for size in sorted(set(weight_bytes)) if size]


def _slot_bytes(visits: Sequence[range], weight_bytes: tuple[int, ...], num_devices: int) -> int:
    pairs = [(visit, visits[i + num_devices : i + num_devices + 1]) for i, visit in enumerate(visits)]
    total = 0
    for size, counts in _layers_of_size(weight_bytes):
        held = (
            counts[visit.stop] - counts[visit.start] + sum(counts[n.stop] - counts[n.start] for n in following)
            for visit, following in pairs
        )
        total += size * int(max(held))
    return total


def _boundaries(passes: Passes, costs: LayerCosts, round_: Round) -> list[int]:
    """By visit, on its device. A device alone also holds what its last visit handed on; else that is elsewhere."""
    inputs, microbatches = (*costs.input_bytes, 0), round_.num_microbatches
    is_alone = round_.num_devices == 1
    kept = {layers.start for pass_, layers in passes if pass_ is Pass.BACKWARD}
    saved: list[dict[int, int]] = [{} for _ in range(round_.num_devices)]
    held = []
    for visit, (pass_, layers) in enumerate(passes):
        own = saved[visit % round_.num_devices]
        arriving = microbatches if is_alone and layers.start else 1
        if pass_ is Pass.FORWARD:
            own.update((layer, inputs[layer] * microbatches) for layer in layers if layer in kept)
            taken, made = 0 if layers.start in kept else inputs[layers.start], inputs[layers.stop]
            moving = max(taken * arriving + made, taken + made * microbatches)
        elif pass_ is Pass.FUSED:
            moving = inputs[layers.start] * (arriving if is_alone else microbatches)
        else:
            moving = inputs[layers.stop] * arriving + (0 if is_alone else inputs[layers.start] * microbatches)
            for done in [layer for layer in own if layer > layers.start]:
                del own[done]
        held.append(sum(own.values()) + moving)
    return held


def stage_limits(round_: Round) -> list[float]:
    """Limits for the bytes that one stage needs by itself, to try from the loosest."""
    return [round_.budget_bytes * share for share in _SHARES] if round_.budget_bytes < inf else [inf]


def stage_needs(costs: LayerCosts, round_: Round) -> dict[Pass, list[float]]:
    """Running sums of the bytes that a layer adds to a stage of its pass."""
    graph = costs.input_bytes if round_.grain == "layer" else costs.saved_bytes
    backward = [sum(parts) for parts in zip(costs.weight_bytes, costs.gradient_bytes, graph, strict=True)]
    return {Pass.FORWARD: sums(costs.weight_bytes), Pass.BACKWARD: sums(backward)}
