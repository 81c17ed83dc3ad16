"""Which layers stay on a device between stage runs: as many as the memory that a plan leaves
holds."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from ..memory.slot_sizes import slot_bytes
from .actions import Passes
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
    if num_copies * sum(costs.weight_bytes) * costs.up_ms_per_byte < compute_ms:
        return None
    left = replace(workload, limit_bytes=workload.limit_bytes - there, keeps_layers=False)
    return replace(costs, weight_bytes=costs.offloaded_bytes), left


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
