"""The memory that calls leave on the devices beside their plans: where one engine has them for
itself, and where the parts of a model share them."""

from collections.abc import Sequence
from math import inf
from typing import Protocol

from ..autoplan.free_memory import FreeMemory
from ..autoplan.planned import Needs, Planned
from ..plan.actions import Passes
from ..plan.schedule import saved_layers
from .state import Host


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
