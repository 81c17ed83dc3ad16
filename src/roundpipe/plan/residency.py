"""Which layers stay on a device between visits: as many as the memory that a plan leaves holds."""

from collections import Counter
from collections.abc import Sequence

from .actions import Passes


def resident_layers(
    rounds: Sequence[Passes], weight_bytes: Sequence[int], trained_bytes: Sequence[int], spare_bytes: float
) -> frozenset[int]:
    """The layers worth keeping, those that save most of their bytes first.

    A device that makes all of a call in one visit holds those slots anyway, so keeping them costs nothing. A layer of
    which nothing stays the same is not kept even then: the next call's first layers can use its slot earlier.

    Args:
        rounds: the visits of one call, or of its forward and its backward.
        weight_bytes: the size of each layer's slot.
        trained_bytes: how much of it every step changes, which goes up once a step in any case.
        spare_bytes: what the plan leaves of the device.
    """
    stages = [layers for passes in rounds for _, layers in passes]
    visits = Counter(layer for layers in stages for layer in layers)
    saved = {
        layer: visits[layer] - trained_bytes[layer] / weight_bytes[layer] for layer in visits if weight_bytes[layer]
    }
    worth = [layer for layer in saved if saved[layer] > 0]
    if len(stages) == 1:
        return frozenset(worth)
    kept = []
    for layer in sorted(worth, key=lambda layer: (-saved[layer], layer)):
        if weight_bytes[layer] > spare_bytes:
            break
        spare_bytes -= weight_bytes[layer]
        kept.append(layer)
    return frozenset(kept)
