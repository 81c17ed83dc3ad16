"""Counts what the layers of a stage run hold of a device while one microbatch is in them."""

from collections.abc import Sequence
from typing import NamedTuple

from .sketch import LayerSketch


class GradientBytes(NamedTuple):
    """Says what one layer's gradients take: as the backward has ``made`` them, ``summed`` over
    microbatches, and ``rounded`` to be offloaded, 0 where that is no copy. If the layer ``stays``
    on the device, so do they until the update."""

    made: int
    summed: int
    rounded: int
    stays: bool


def most_inside(
    layers: Sequence[LayerSketch],
    gradients: Sequence[GradientBytes],
    trained: range,
    num_microbatches: int,
) -> int:
    """Returns the most of graphs, of what computing takes for a moment, and of sums of gradients,
    in the last microbatch of a backward or fused stage run.

    Args:
        layers: of the stage run.
        gradients: of each of them.
        trained: the places of those to which the backward comes.
        num_microbatches: of the stage run's call.
    """
    # The first microbatch's gradients are kept as they are, later ones are added to sums.
    before = [
        0 if num_microbatches == 1 else one.made if num_microbatches == 2 else one.summed
        for one in gradients
    ]
    live = most = sum(before)
    for sketch in layers:
        most = max(most, live + sketch.forward_peak)
        live += sketch.left
    for place in reversed(trained):
        sketch, own = layers[place], gradients[place]
        more = own.summed - before[place]
        adding = own.made * (num_microbatches > 1) + more
        most = max(most, live + sketch.backward_peak, live + adding)
        live += sketch.backward_change - own.made + more
        most = max(most, live + own.rounded)
        if own.stays:
            live += own.rounded
    return most
