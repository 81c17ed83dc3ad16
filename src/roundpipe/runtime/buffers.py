"""Module buffers on a device: copied once, copied again when either side was written, also if nobody says so."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..device import Device, Event
from .transfer import bring

_MOST_COPIES = 4096


class SilentWrites:
    """Which buffers are written without raising their version, as batch norm does with its statistics.

    Learnt by comparing values after a buffer's first forward in each mode. Shared by all devices, because a recompute
    on one must know what a forward on another has shown.
    """

    def __init__(self) -> None:
        self._compared: set[tuple[int, bool]] = set()
        self._written: set[int] = set()

    def is_new(self, original: torch.Tensor, training: bool) -> bool:
        """Whether it is not known yet what forwards in that mode do to it."""
        return id(original) not in self._written and (id(original), training) not in self._compared

    def note(self, original: torch.Tensor) -> None:
        """It was seen that its device copy was written without raising its version."""
        self._written.add(id(original))

    def happen_to(self, original: torch.Tensor) -> bool:
        return id(original) in self._written

    def happened(self, original: torch.Tensor, copy: torch.Tensor, training: bool, *, look_again: bool) -> bool:
        """Whether a forward in that mode has written ``copy``, whose version says that it has not."""
        if id(original) not in self._written and (look_again or (id(original), training) not in self._compared):
            self._compared.add((id(original), training))
            if not torch.equal(copy.cpu(), original.cpu()):
                self._written.add(id(original))
        return training and id(original) in self._written


class BufferCache:
    """Device copies of module buffers, reused while neither side was written."""

    def __init__(self, device: Device, silent: SilentWrites) -> None:
        self._device = device
        self._silent = silent
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor, int]] = {}
        self._arrived = WeakTensorKeyDictionary()

    def place(self, original: torch.Tensor) -> torch.Tensor:
        held = self._copies.get(id(original))
        if held is not None and not self._silent.happen_to(original):
            host, host_version, copy, copy_version = held
            if host is original and host._version == host_version and copy._version == copy_version:
                return copy
        if len(self._copies) >= _MOST_COPIES:
            self._copies.clear()  # because modules that make new tensors in every forward would fill it
        copy = original.detach().to(self._device.torch_device, copy=True)
        self._copies[id(original)] = (original, original._version, copy, copy._version)
        return copy

    def is_placed(self, original: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
        """Whether ``copy`` still is what ``place`` gave for ``original``, as far as versions tell."""
        if original is None or copy is None:
            return original is copy
        held = self._copies.get(id(original))
        return held is not None and held[2] is copy and copy._version == held[3]

    def bring(self, tensor: torch.Tensor, source: Device, ready: Event) -> torch.Tensor:
        """A device's buffer on this device. Brought once, as long as it lives: nobody may write to either."""
        if source is not self._device:
            self._device.compute.wait(ready)
        if self._device.holds(tensor):
            return tensor
        if tensor not in self._arrived:
            (self._arrived[tensor],) = bring([tensor], source, ready, self._device)
        arrived: torch.Tensor = self._arrived[tensor]
        return arrived

    def clear(self) -> None:
        self._copies.clear()
        self._arrived.clear()
