"""What stays on a device between stage runs, as far as the memory that a plan leaves holds it:
weights, and graphs from a forward to its backward."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from ..memory.slot_sizes import slot_bytes
from .actions import Pass, Passes
from .costs import LayerCosts, Workload


def resident_layers(
    rounds: Sequence[Passes],
    weight_bytes: Sequence[int],
    trained_bytes: Sequence[int],
    fits: Callable[[frozenset[int]], bool],
) -> frozenset[int]:
    """The layers worth keeping, those that save most of their bytes first.

    A device that makes all of a call in one stage run holds those slots anyway, so keeping them
    costs nothing. A layer of which nothing stays the same is not kept even then: the next call's
    first layers can use its slot earlier.

    Args:
        rounds: the stage runs of one call, or of its forward and its backward.
        weight_bytes: the size of each layer's slot.
        trained_bytes: how much of it every step changes, which goes up once a step in any case.
        fits: whether a device has room for such layers beside the stage runs.
    """
    stages = [layers for passes in rounds for _, layers in passes]
    stage_runs = Counter(layer for layers in stages for layer in layers)
    saved = {
        layer: stage_runs[layer] - trained_bytes[layer] / weight_bytes[layer]
        for layer in stage_runs
        if weight_bytes[layer]
    }
    worth = sorted(
        (layer for layer in saved if saved[layer] > 0), key=lambda layer: (-saved[layer], layer)
    )
    if len(stages) == 1:
        return frozenset(worth)
    kept = frozenset[int]()
    # By how much they save, because what saves less may need less: a stage run's own slots are
    # there anyway.
    for _, alike in groupby(worth, key=saved.__getitem__):
        kept = _with_most_of(list(alike), kept, fits)
    return kept


def with_all_resident(costs: LayerCosts, workload: Workload) -> tuple[LayerCosts, Workload] | None:
    """What is left to plan for if every layer stays on every device: of weights only what trains
    goes up.

    Returns:
        None where that is most of them, where they do not fit, and where computing hides their
        copies anyway.
    """
    there = sum(slot_bytes(num_bytes) for num_bytes in costs.weight_bytes if num_bytes)
    trains = 2 * sum(costs.offloaded_bytes) > sum(costs.weight_bytes)
    if trains or not workload.keeps_layers or there >= workload.limit_bytes:
        return None
    # Up for a forward and again for a backward, on each of the devices that share a stage.
    num_copies = 2 * (workload.num_devices if workload.may_share else 1)
    compute_ms = workload.num_microbatches * (sum(costs.forward) + sum(costs.backward))
    if num_copies * sum(costs.upload_bytes) * costs.up_ms_per_byte < compute_ms:
        return None
    left = replace(workload, limit_bytes=workload.limit_bytes - there, keeps_layers=False)
    trained = costs.offloaded_bytes
    return replace(costs, weight_bytes=trained, upload_bytes=trained), left


def graphs_kept_from(
    stages: Sequence[range],
    costs: LayerCosts,
    workload: Workload,
    taken_bytes: Sequence[int],
    free_bytes: float,
) -> tuple[int, int]:
    """The shallowest layer from which on all layers may keep the graphs of all microbatches until
    the backward, which so recomputes only the layers above it; and the bytes that this takes of a
    device. The deepest ones are kept, because their backward comes first.

    Args:
        stages: of the backward, deepest first.
        taken_bytes: by layer, what its weights take on a device for as long as its graph is there.
        free_bytes: of each device. Kept stages go to devices in turn.
    """
    first, most, used = costs.num_layers, 0, [0] * workload.num_devices
    for place, stage in enumerate(stages):
        device = place % workload.num_devices
        for layer in reversed(stage):
            graphs = costs.saved_bytes[layer] * workload.num_microbatches
            used[device] += graphs + (slot_bytes(taken_bytes[layer]) if taken_bytes[layer] else 0)
            if used[device] > free_bytes:
                return first, most
            first, most = layer, max(most, used[device])
    return first, most


def with_kept_graphs(forward: Passes, backward: Passes, first: int) -> tuple[Passes, Passes]:
    """Both rounds, where the layers from ``first`` on run forward in the stages of their backward.
    A stage on both sides of ``first`` becomes two."""
    kept = [
        (pass_, range(max(layers.start, first), layers.stop))
        for pass_, layers in backward
        if layers.stop > first
    ]
    recomputed = _above(backward, first)
    ahead = [(Pass.FORWARD, layers) for _, layers in reversed(kept)]
    return [*_above(forward, first), *ahead], [*kept, *recomputed]


def _with_most_of(
    layers: Sequence[int], kept: frozenset[int], fits: Callable[[frozenset[int]], bool]
) -> frozenset[int]:
    low, high = 0, len(layers)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(kept.union(layers[:middle])):
            low = middle
        else:
            high = middle - 1
    return kept.union(layers[:low])


def _above(passes: Passes, end: int) -> Passes:
    return [
        (pass_, range(layers.start, min(layers.stop, end)))
        for pass_, layers in passes
        if layers.start < end
    ]
