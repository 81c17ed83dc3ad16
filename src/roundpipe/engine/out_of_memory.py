"""What is tried where a device runs out of memory, so that a call is made all the same.

[Note: out of memory] A call that fails has no effect, so it can be made again. In this order:
[1] The planner has learnt from it (see `ShapeMeasurements.shortages`): it has another plan, or
    keeps more inputs on the host.
[2] The last such try recomputes one layer at a time, unless the caller has said otherwise.
[3] A batch that the engine may cut is cut into twice as many microbatches, and all begins anew.
    Only the caller knows whether losses of other microbatches add up to the same, so he says so by
    handing in a function that cuts.
What [2] and [3] came to is kept for later calls. Backward stage runs that run on after their call
has returned, and backward passes of the caller's own graph, cannot be made again, nor can calls
that have gone beyond the engine: whose layers have written to their input where the caller has it,
or whose loss has given parameters of the caller's own their gradients. What fails there is raised.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..autoplan.planner import Planner
from ..device import Device
from ..errors import PlanError
from .batches import Batch

_log = logging.getLogger("roundpipe")
_MADE_AGAIN = 3  # times at most before a batch is cut finer

T = TypeVar("T")


class OutOfMemoryBackoff:
    """Of one runner, whose calls are told apart by ``what`` they are called. Used by the caller's
    thread."""

    def __init__(self, name: str, planner: Planner, devices: Sequence[Device]) -> None:
        self._name = name
        self._planner = planner
        self._devices = devices
        self._by_layer: set[str] = set()
        self._num_microbatches: dict[str, int] = {}

    def run(self, what: str, batch: Batch, attempt: Callable[[Batch], T]) -> T:
        """Returns what ``attempt`` makes of the batch. Raises its last error if nothing is left to
        try."""
        left, finer = _MADE_AGAIN, batch.in_at_least(self._num_microbatches.get(what, 0))
        batch = finer or batch
        if what in self._by_layer:
            batch.recompute_by_layer()
        while True:
            shortages = self._planner.shortages
            try:
                return attempt(batch)
            except (torch.OutOfMemoryError, PlanError) as error:
                is_full = isinstance(error, torch.OutOfMemoryError)
                if is_full and self._planner.shortages == shortages:
                    raise  # because it is not a device of this engine's that is full
                if not batch.can_run_again(self._devices):
                    raise
                if is_full and left:
                    left -= 1
                else:
                    finer = batch.in_at_least(2 * batch.num_microbatches)
                    if finer is None:
                        raise
                    batch, left = finer, _MADE_AGAIN
                    self._num_microbatches[what] = batch.num_microbatches
                if not left:
                    batch.recompute_by_layer()
                    self._by_layer.add(what)
                _log.warning(
                    "%s: %s is made again with less on its devices, in %d microbatches, because "
                    "of: %s",
                    self._name,
                    what,
                    batch.num_microbatches,
                    error,
                )
