"""The memory that calls leave on the devices beside their plans, where one engine has them for
itself and where the parts of a model share them; and what is tried where a device runs out of it,
so that a call is made all the same.

[Note: out of memory] A call that fails has no effect, so it can be made again. In this order:
[1] Recordings of layers, which fill what a plan leaves, are gone: the plan stays.
[2] The planner has learnt from it (see `ShapeMeasurements.shortages`): it has another plan, or
    keeps more inputs on the host.
[3] The last such try recomputes one layer at a time, unless the caller has said otherwise.
[4] A batch that the engine may cut is cut into twice as many microbatches, and all begins anew.
    Only the caller knows whether losses of other microbatches add up to the same, so he says so by
    handing in a function that cuts.
What [3] and [4] came to is kept for later calls. Backward stage runs that run on after their call
has returned, and backward passes of the caller's own graph, cannot be made again, nor can calls
that have gone beyond the engine: whose layers have written to their input where the caller has it,
or whose loss has given parameters of the caller's own their gradients. What fails there is raised.
"""

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol, TypeVar

import torch

from ..autoplan.free_memory import FreeMemory
from ..autoplan.planned import Needs, Planned
from ..autoplan.planner import Planner
from ..device import Device
from ..errors import PlanError
from ..plan.actions import Passes
from ..plan.schedule import saved_layers
from .batches import Batch
from .state import Host

_log = logging.getLogger("roundpipe")
_MADE_AGAIN = 3  # times at most before a batch is cut finer

T = TypeVar("T")


class DeviceMemory(Protocol):
    """Decides what calls of one runner may leave on the devices beside their plans."""

    def settle(self, planned: Planned, later: Passes) -> Planned:
        """A call comes, and ``later`` its backward. Makes room, or has its inputs wait on the
        host."""
        ...

    def slot_limit(self, planned: Planned) -> float:
        """Bytes that slots may take."""
        ...

    def resident_layers(
        self, planned: Planned, rounds: Sequence[Passes], graph_bytes: int
    ) -> frozenset[int]:
        """The layers that stay when their stage runs are over, beside kept graphs."""
        ...

    def graphs_kept_from(self, planned: Planned, backward: Passes) -> tuple[int, int]:
        """The first layer whose graphs stay from a forward to its backward, and the bytes that
        this takes of a device. See [Note: kept graphs]."""
        ...


class OwnMemory:
    """The memory of devices that one engine has for itself: its layers have device states in what
    calls leave of it."""

    def __init__(self, free: FreeMemory, host: Host) -> None:
        self.free = free
        self.slot_limit = free.slot_limit
        self.resident_layers = free.resident_layers
        self.graphs_kept_from = free.graphs_kept_from
        self._device_states = host.device_states
        self._steps = host.steps

    def settle(self, planned: Planned, later: Passes) -> Planned:
        self.free.let_device_states(planned)
        if self._device_states.must_shrink:
            self._steps.leave_devices()
        return planned


class KeptInputs:
    """Inputs that all parts of a model keep at once, each from its part's forward to its backward.

    Each part's plan counts on the devices as if it were alone, which it is while it runs but for
    these. Used by the caller's thread.
    """

    def __init__(self) -> None:
        self._needs: dict[str, Needs] = {}

    def suffices(self, part: str, needs: Needs) -> bool:
        """Says whether ``part`` may keep what its plan wants to. Notes its ``needs`` for the
        others' sake.

        Whichever part runs must find room beside what all others keep, counted as if that were on
        one device.
        """
        self._needs[part] = needs
        everyone = self._needs.values()
        kept = sum(each.kept for each in everyone)
        return all(kept - each.kept + each.most <= each.allowed for each in everyone)


class SharedMemory:
    """Of devices that one part has while it runs. No layers stay and none have device states,
    because each part's planner believes that the devices' spare memory is its own."""

    def __init__(self, part: str, free: FreeMemory, kept: KeptInputs) -> None:
        self.slot_limit = free.slot_limit
        self._part = part
        self._kept = kept

    def settle(self, planned: Planned, later: Passes) -> Planned:
        """Other parts run between this one's forward and its backward: without room for all, kept
        inputs wait on the host."""
        if not later or self._kept.suffices(self._part, planned.needs):
            return planned
        # All that is kept, however much that is.
        needs = planned.needs._replace(waiting=inf)
        return planned._replace(spilled=saved_layers(later), needs=needs)

    def resident_layers(
        self, planned: Planned, rounds: Sequence[Passes], graph_bytes: int
    ) -> frozenset[int]:
        return frozenset()

    def graphs_kept_from(self, planned: Planned, backward: Passes) -> tuple[int, int]:
        return backward[0][1].stop, 0


class OutOfMemoryBackoff:
    """One runner's, whose calls are told apart by ``what`` they are called. Used by the caller's
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
            before = self._planner.shortages
            try:
                return attempt(batch)
            except (torch.OutOfMemoryError, PlanError) as error:
                is_full = isinstance(error, torch.OutOfMemoryError)
                after = self._planner.shortages
                if is_full and after == before:
                    raise  # because it is not a device of this engine's that is full
                if not batch.can_run_again(self._devices):
                    raise
                if is_full and after.of_plans == before.of_plans:
                    pass  # because each device lets recordings go once, and never makes them again
                elif is_full and left:
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
