"""How much of its devices an engine may plan with: what was free when it was last asked, and what
was its own."""

from collections.abc import Callable, Mapping, Sequence

from ..device import Device

# What plans may fill of a device: temporaries inside layers take the rest. Less before graphs were
# measured.
_PLANNED, _PLANNED_BLINDLY = 0.9, 0.5
# A limit this large says that nothing is known of the device's memory.
_UNKNOWN = 2.0**60


class MemoryLimit:
    """Of the smallest device. Used by the caller's thread.

    Args:
        held_bytes: by device, what the engine holds there while it does nothing; None while it does
            something.
    """

    def __init__(
        self, devices: Sequence[Device], held_bytes: Callable[[], Mapping[str, int] | None]
    ) -> None:
        self._devices = devices
        self._held_bytes = held_bytes
        self._num_bytes: float | None = None

    def ask(self) -> None:
        """As it is now. While the engine does something its own use cannot be told apart, so the
        last answer stands."""
        held = self._held_bytes()
        if self._num_bytes is None or held is not None:
            self._num_bytes = min(
                device.limit_bytes((held or {}).get(device.name, 0)) for device in self._devices
            )

    @property
    def num_bytes(self) -> float:
        """When it was last asked."""
        if self._num_bytes is None:
            self.ask()
        assert self._num_bytes is not None
        return self._num_bytes

    @property
    def is_known(self) -> bool:
        """Whether anything is known of the devices' memory."""
        return self.num_bytes < _UNKNOWN

    def for_plans(self, callers_bytes: int, *, blindly: bool) -> float:
        """What a plan may fill beside what the caller has on a device. ``blindly``: before graphs
        were measured."""
        return max(
            self.num_bytes * (_PLANNED_BLINDLY if blindly else _PLANNED) - callers_bytes, 0.0
        )
