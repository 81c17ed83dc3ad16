"""Reusable device buffers for weights, so that nothing is allocated while training and addresses
stay the same."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..device import Device, Event
from .slot_sizes import slot_bytes


class Slot(NamedTuple):
    """A device buffer. Whoever takes it makes its lane wait for ``free`` before writing."""

    buffer: torch.Tensor
    free: Event


class SlotPool:
    """Free buffers of one device, by size. Used by that device's worker only, so it needs no
    lock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, deque[Slot]] = {}
        self.num_bytes = 0

    def __repr__(self) -> str:
        free = sum(len(slots) for slots in self._free.values())
        return f"<SlotPool {self._device.name}: {self.num_bytes / 2**20:.1f} MiB, {free} free>"

    def take(self, num_bytes: int) -> Slot:
        size = slot_bytes(num_bytes)
        slots = self._free.get(size)
        if slots:
            return slots.popleft()  # what was given back first is free first
        with self._device.up.work():
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        self.num_bytes += size
        return Slot(buffer, self._device.up.record())

    def give_back(self, buffer: torch.Tensor, free: Event) -> None:
        """The buffer may be overwritten by work that waits for ``free``."""
        self._free.setdefault(buffer.numel(), deque()).append(Slot(buffer, free))

    def keep_only(self, most: Mapping[int, int]) -> None:
        """Drops free buffers, once no lane uses them any more, but for so many ``most`` by size."""
        for size, slots in self._free.items():
            while len(slots) > most.get(size, 0):
                slots.popleft().free.wait()  # what was given back first is free first
                self.num_bytes -= size

    def clear(self) -> None:
        """Drops all free buffers once no lane uses them any more."""
        self.keep_only({})
