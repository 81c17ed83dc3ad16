"""What a plan needs at most on one device. Counts what the engine holds; workspace of kernels is
not known here.

[Note: device memory] Four things share a device:

* *slots*: the weights of the stage run that runs and of the device's next one, already on its way
  up. Slots are kept by size (memory/slots.py), so a size counts with the most layers of it ever
  held at once.
* *graph*: what autograd keeps of one microbatch, for the layers whose backward runs at once: the
  whole stage, or with grain "layer" one layer, beside the inputs of the others. And the largest
  gradients that pass through a layer.
* *sums*: gradient accumulators of the stage run, and of the device's stage run before it, which are
  still going down.
* *boundaries*: inputs kept for backward stage runs, and tensors on their way to the next stage run,
  for all microbatches. Kept inputs that do not fit wait on the host (they are *spilled*) and come
  back one microbatch ahead of their use. A worker runs ahead of its lanes, but not further than is
  counted here.

A stage visited in shares is not looked at here: each group of devices is a round of its own, see
``Workload.of_share``.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf
from operator import add
from typing import NamedTuple

from ..errors import PlanError
from ..memory.slot_sizes import slot_bytes
from .actions import Pass, Passes
from .costs import LayerCosts, StageSums, Workload, sums
from .schedule import saved_layers

# Of spilled inputs: microbatches whose inputs may be on their way down, and inputs that may be
# back.
DOWN_AT_ONCE, BACK_AT_ONCE = 2, 3
# What a single stage may take of a limit that it shares with prefetched weights and boundaries:
# loosest first.
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


class Peak(NamedTuple):
    """What a plan needs on one device if the inputs of the ``spilled`` layers wait on the host.

    ``kept``: bytes of the other inputs that are kept, on all devices together; ``waiting``: bytes
    of those on the host.
    """

    bytes: PeakBytes
    spilled: frozenset[int]
    kept: int
    waiting: int = 0


def readable(num_bytes: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def predicted_peak(
    passes: Passes,
    stages: StageSums,
    workload: Workload,
    spilled: frozenset[int] = frozenset(),
    resident: frozenset[int] = frozenset(),
) -> PeakBytes:
    """The most that one device holds at once, see [Note: device memory].

    Args:
        spilled: layers whose kept inputs wait on the host.
        resident: layers whose slots stay on every device.
    """
    return _peak(passes, stages, workload, saved_layers(passes), spilled, resident)


def _peak(
    passes: Passes,
    stages: StageSums,
    workload: Workload,
    saved: frozenset[int],
    spilled: frozenset[int],
    resident: frozenset[int] = frozenset(),
) -> PeakBytes:
    weights, num_devices = stages.costs.weight_bytes, workload.num_devices
    coming = tuple(0 if layer in resident else num_bytes for layer, num_bytes in enumerate(weights))
    slots = _slot_bytes(
        [layers for _, layers in passes], coming if resident else weights, num_devices
    )
    slots += sum(slot_bytes(weights[layer]) for layer in resident)
    gradients = stages.gradients
    offloading = [
        0 if pass_ is Pass.FORWARD else gradients[at.stop] - gradients[at.start]
        for pass_, at in passes
    ]
    boundaries = _boundaries(passes, stages.costs, workload, saved, spilled)
    kept, most_passing = stages.saved, max(stages.passing)
    fullest, most = (0, 0, 0), -1
    for stage_run, (pass_, layers) in enumerate(passes):
        offloaded = int(
            offloading[stage_run]
            + (offloading[stage_run - num_devices] if stage_run >= num_devices else 0)
        )
        graph, rest = 0, offloaded + boundaries[stage_run]
        if pass_ is not Pass.FORWARD:
            if (
                workload.grain == "stage"
                and kept[layers.stop] - kept[layers.start] + most_passing + rest <= most
            ):
                # A search asks for thousands of stage runs; what follows would be most of the work.
                continue
            graph = _graph_bytes(pass_, layers, stages, workload)
        if graph + rest > most:
            fullest, most = (graph, offloaded, boundaries[stage_run]), graph + rest
    return PeakBytes(slots, *fullest)


def held_beside(
    passes: Passes,
    stages: StageSums,
    workload: Workload,
    spilled: frozenset[int],
    resident: frozenset[int],
) -> tuple[list[int], list[int]]:
    """By stage run, bytes of its device's slots, and of what lies there beside them and beside its
    own graph and sums: boundaries, and the sums of the device's stage run before, on their way
    down."""
    weights, gradients, num_devices = (
        stages.costs.weight_bytes,
        stages.gradients,
        workload.num_devices,
    )
    coming = tuple(0 if layer in resident else own for layer, own in enumerate(weights))
    there = sum(slot_bytes(weights[layer]) for layer in resident if weights[layer])
    # Where rounds go round the devices evenly, each has the same stage runs in every round.
    step = num_devices if len(passes) % num_devices == 0 else 1
    slots = [0] * len(passes)
    for first in range(step):
        own = [layers for _, layers in passes[first::step]]
        held = there + _slot_bytes(own, coming, num_devices // step)
        slots[first::step] = [held] * len(own)
    boundaries = _boundaries(passes, stages.costs, workload, saved_layers(passes), spilled)
    before = [None] * num_devices + list(passes)
    leaving = [
        0
        if run is None or run[0] is Pass.FORWARD
        else int(gradients[run[1].stop] - gradients[run[1].start])
        for run in before
    ]
    return slots, [held + down for held, down in zip(boundaries, leaving, strict=False)]


def least_peak(passes: Passes, stages: StageSums, workload: Workload) -> PeakBytes:
    """With every kept input on the host: if that does not fit, nothing does."""
    saved = saved_layers(passes)
    return _peak(passes, stages, workload, saved, spilled=saved)


def fitted_peak(passes: Passes, stages: StageSums, workload: Workload) -> Peak:
    """With as few inputs on the host as the limit asks for: the shallowest first, because they wait
    longest."""
    saved, spilled = saved_layers(passes), frozenset[int]()
    peak = _peak(passes, stages, workload, saved, spilled)
    for layer in sorted(saved):
        if peak.total <= workload.limit_bytes:
            break
        spilled |= {layer}
        peak = _peak(passes, stages, workload, saved, spilled)
    kept, waiting = (
        sum(stages.costs.input_bytes[layer] for layer in layers) * workload.num_microbatches
        for layers in (saved - spilled, spilled)
    )
    return Peak(peak, spilled, kept, waiting)


def nothing_fits(
    costs: LayerCosts,
    workload: Workload,
    least: PeakBytes | None,
    *,
    has_backward: bool = True,
    model: str = "",
) -> PlanError:
    """Names the layer that is too large by itself, else says what the smallest plan tried needs."""
    limit, remedy = workload.limit_bytes, "use smaller microbatches or raise max_gpu_memory"
    kinds = [costs.weight_bytes]
    if has_backward:
        kinds += [costs.gradient_bytes, costs.saved_bytes, costs.passing_bytes]
    alone = [sum(parts) for parts in zip(*kinds, strict=True)]
    layer = max(range(costs.num_layers), key=alone.__getitem__)
    if alone[layer] > limit:
        return PlanError(
            f"{model}layer {layer} alone needs {readable(alone[layer])} on a device (weights "
            f"{readable(costs.weight_bytes[layer])}, the rest activations and gradients), "
            f"{readable(limit)} is allowed; {remedy}"
        )
    return PlanError(
        f"{model}the smallest plan tried needs {least} on a device, {readable(limit)} is allowed; "
        f"layer {layer} needs {readable(alone[layer])} of that; {remedy}"
    )


def _graph_bytes(pass_: Pass, layers: range, stages: StageSums, workload: Workload) -> int:
    """What autograd keeps of one microbatch in a stage run."""
    start = max(layers.start, min(workload.first_trained, layers.stop))
    if pass_ is Pass.FORWARD or start == layers.stop:
        return 0
    passing = max(stages.passing[start : layers.stop])
    if pass_ is Pass.BACKWARD and workload.grain == "layer":
        inner = stages.inputs[layers.stop] - stages.inputs[start + 1]
        return int(max(stages.costs.saved_bytes[start : layers.stop]) + inner) + passing
    return int(stages.saved[layers.stop] - stages.saved[start]) + passing


@lru_cache(maxsize=8)
def _layers_of_size(weight_bytes: tuple[int, ...]) -> list[tuple[int, list[float]]]:
    """Every size of slot with running counts of its layers."""
    sizes = [slot_bytes(own) if own else 0 for own in weight_bytes]
    return [(size, sums([own == size for own in sizes])) for size in sorted(set(sizes)) if size]


def slot_counts(
    stage_runs: Sequence[range], weight_bytes: tuple[int, ...], num_devices: int
) -> dict[int, int]:
    """How many slots of each size a device holds at most: those of a stage run and of its next one.

    Args:
        weight_bytes: by layer; 0 for one that takes no slot.
    """
    most = {}
    for size, counts in _layers_of_size(weight_bytes):
        own = [counts[stage_run.stop] - counts[stage_run.start] for stage_run in stage_runs]
        following = [*own[num_devices:], *[0.0] * num_devices]
        most[size] = int(max(map(add, own, following), default=0))  # a device may have no stage run
    return most


def _slot_bytes(
    stage_runs: Sequence[range], weight_bytes: tuple[int, ...], num_devices: int
) -> int:
    return sum(
        size * count for size, count in slot_counts(stage_runs, weight_bytes, num_devices).items()
    )


def _boundaries(
    passes: Passes,
    costs: LayerCosts,
    workload: Workload,
    saved: frozenset[int],
    spilled: frozenset[int],
) -> list[int]:
    """By stage run, on its device. A device alone also holds what its last stage run handed on;
    else that is elsewhere."""
    inputs, microbatches = (*costs.input_bytes, 0), workload.num_microbatches
    is_alone = workload.num_devices == 1
    staying, leaving = sorted(saved - spilled), sorted(saved & spilled)
    leaving_bytes = [0, *accumulate(inputs[layer] for layer in leaving)]
    on_device: list[list[int]] = [[] for _ in range(workload.num_devices)]  # layers, deepest last
    kept_bytes = [0] * workload.num_devices
    held = []
    for stage_run, (pass_, layers) in enumerate(passes):
        device, start, stop = stage_run % workload.num_devices, layers.start, layers.stop
        arriving = microbatches if is_alone and start else 1
        if pass_ is Pass.FORWARD:
            for layer in staying[bisect_left(staying, start) : bisect_left(staying, stop)]:
                on_device[device].append(layer)
                kept_bytes[device] += inputs[layer] * microbatches
            down = min(DOWN_AT_ONCE, microbatches)
            moving = down * (
                leaving_bytes[bisect_left(leaving, stop)]
                - leaving_bytes[bisect_right(leaving, start)]
            )
            taken = inputs[start] if start in spilled or start not in saved else 0
            going = taken * down if start in spilled else taken
            moving += max(
                max(taken * arriving, going) + inputs[stop], going + inputs[stop] * microbatches
            )
        elif pass_ is Pass.FUSED:
            moving = inputs[start] * (arriving if is_alone else microbatches)
        else:
            moving = inputs[stop] * arriving + (0 if is_alone else inputs[start] * microbatches)
            moving += inputs[start] * min(BACK_AT_ONCE, microbatches) if start in spilled else 0
            while on_device[device] and on_device[device][-1] > start:
                kept_bytes[device] -= inputs[on_device[device].pop()] * microbatches
        held.append(kept_bytes[device] + moving)
    return held


def stage_limits(workload: Workload) -> list[float]:
    """Limits for the bytes that one stage needs by itself, to try from the loosest."""
    return (
        [workload.limit_bytes * share for share in _SHARES] if workload.limit_bytes < inf else [inf]
    )


def stage_needs(costs: LayerCosts, workload: Workload) -> dict[Pass, list[float]]:
    """Running sums of the bytes that a layer adds to a stage of its pass."""
    graph = costs.input_bytes if workload.grain == "layer" else costs.saved_bytes
    backward = [
        sum(parts) for parts in zip(costs.weight_bytes, costs.gradient_bytes, graph, strict=True)
    ]
    return {Pass.FORWARD: sums(costs.weight_bytes), Pass.BACKWARD: sums(backward)}
