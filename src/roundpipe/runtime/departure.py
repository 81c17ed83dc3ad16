"""When a layer is done with its weights, which is long before its stage run is over.

In a stage run's last backward the deepest layer is done first. Its slot may be filled with the next
stage run's first layers while shallower ones still work, so that the next call need not wait for
its weights.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ..device import Event, Lane


class Departure:
    """One layer in the last backward of its stage run.

    Every node of the layer's graph leads to one of its inputs or to one of its parameters. So once
    the gradients of all of those have been queued, so has everything that reads the weights. Told
    of gradients by autograd's threads; read by the worker, which waits for them.
    """

    def __init__(self, lane: Lane, inputs: Iterable[Any], *, trains: bool) -> None:
        self.free: Event | None = None
        self._lane = lane
        self._inputs_left = 0
        self._waits_for_parameters = trains
        for leaf in inputs:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._inputs_left += 1
                leaf.register_hook(self._input_came)

    def parameters_came(self) -> None:
        """All parameters have their gradients. Said again if a layer that runs backward inside its
        own sends more."""
        self._waits_for_parameters = False
        self._look()

    def _input_came(self, gradient: torch.Tensor) -> None:
        self._inputs_left -= 1
        self._look()

    def _look(self) -> None:
        if not self._inputs_left and not self._waits_for_parameters:
            self.free = self._lane.record()
