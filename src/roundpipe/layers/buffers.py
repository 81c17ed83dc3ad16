"""Module buffers on a device: copied once, copied again when either side was written, also if
nobody says so.

[Note: written buffers] What the user writes through ``.data`` or NumPy does not raise a version.
So buffers are compared with what was last seen of them, up to a size that takes no time. Of larger
ones writes that torch counts are seen, and the others when `reload_parameters` says so.
"""

import threading
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..device import Device

# Bytes. Reading them takes no time beside a stage run.
_MOST_COMPARED = 1 << 20


class BufferValue:
    """What one of the user's buffers holds from one write to the next.

    ``host`` is a copy that nobody writes, made when somebody may ask for the value after that, or
    compare it.
    """

    def __init__(self, original: torch.Tensor) -> None:
        # Read before the values are, because whoever writes them at this moment raises it
        # afterwards.
        self._version = original._version
        # Also keeps the memory from being used again for what takes its place.
        self._home = original.data if original.layout is torch.strided else None
        self.host: torch.Tensor | None = None
        if _is_compared(original):
            self.keep(original)

    def is_still_of(self, original: torch.Tensor) -> bool:
        if original._version != self._version:
            return False
        if self._home is not None and original.data_ptr() != self._home.data_ptr():
            return False
        return self.host is None or not _is_compared(original) or torch.equal(original, self.host)

    def keep(self, original: torch.Tensor) -> None:
        """To be called while ``original``, the user's buffer, still holds it."""
        if self.host is None:
            self.host = original.detach().to("cpu", copy=True)


class KnownBuffer:
    """What is known of one of the user's buffers. ``compared``: modes whose forwards were seen to
    write it or not."""

    def __init__(self) -> None:
        self.value: BufferValue | None = None  # the latest
        self.compared: set[bool] = set()
        self.is_written_silently = False

    def is_unclear(self, training: bool) -> bool:
        """Whether nobody knows yet what forwards in that mode do to it."""
        return not self.is_written_silently and training not in self.compared


class KnownBuffers:
    """The user's buffers, each as long as it exists: what it holds, and whether writes to it raise
    its version.

    Those of batch norm to its statistics do not. That is learnt by comparing values after a
    buffer's first forward in each mode. Shared by all devices, because a recompute on one must know
    what a forward on another has shown.
    """

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()
        # Because devices that ask at the same time must be told of the same buffer.
        self._lock = threading.Lock()

    def of(self, original: torch.Tensor) -> KnownBuffer:
        with self._lock:
            known: KnownBuffer | None = self._known.get(original)
            if known is None:
                known = self._known[original] = KnownBuffer()
            return known

    def value(self, original: torch.Tensor) -> BufferValue:
        """What it holds now. Another one each time if that is the only way to be sure."""
        known = self.of(original)
        value = known.value
        if value is None or known.is_written_silently or not value.is_still_of(original):
            value = known.value = BufferValue(original)
        return value

    def forget_values(self) -> None:
        """Somebody may have written to any of them. With no stage run under way that has yet to
        see what they held before."""
        with self._lock:
            for known in self._known.values():
                known.value = None


def _is_compared(buffer: torch.Tensor) -> bool:
    is_plain = buffer.layout is torch.strided and buffer.device.type == "cpu"
    return is_plain and buffer.nbytes <= _MOST_COMPARED


class _Copy(NamedTuple):
    """A value on a device. ``version``: the tensor's, as long as no forward has written it.

    Does not know the value, which keeps it alive.
    """

    tensor: torch.Tensor
    version: int

    @property
    def is_intact(self) -> bool:
        return self.tensor._version == self.version


class _Latest(NamedTuple):
    value: BufferValue
    copy: _Copy


class BufferCache:
    """One device's copies of module buffers, reused while neither side was written.

    Used by the device's worker only. Its forwards write to copies, so other devices are never given
    one.
    """

    def __init__(self, device: Device, known: KnownBuffers) -> None:
        self._device = device
        self._known = known
        self._latest = WeakTensorKeyDictionary()  # by the user's buffer: as it was last placed
        self._copies: WeakKeyDictionary[BufferValue, _Copy] = WeakKeyDictionary()

    def known(self, original: torch.Tensor) -> KnownBuffer:
        return self._known.of(original)

    def place(self, original: torch.Tensor) -> torch.Tensor:
        """A copy of the user's buffer as it is now."""
        value = self._known.value(original)
        copy = self._copy_of(value, original)
        self._latest[original] = _Latest(value, copy)
        return copy.tensor

    def restore(self, value: BufferValue) -> torch.Tensor:
        """A copy of a value that was kept, whatever the buffer holds by now."""
        assert value.host is not None
        return self._copy_of(value, value.host).tensor

    def _copy_of(self, value: BufferValue, original: torch.Tensor) -> _Copy:
        copy = self._copies.get(value)
        if copy is None or not copy.is_intact:
            # Rather what was kept, because the user may be writing the buffer while a late stage
            # run is at work.
            source = original if value.host is None else value.host
            tensor = source.detach().to(self._device.torch_device, copy=True)
            copy = self._copies[value] = _Copy(tensor, tensor._version)
        return copy

    def is_placed(self, original: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
        """Whether ``copy`` still is what ``place`` last gave for ``original``, as far as versions
        tell."""
        if original is None or copy is None:
            return original is copy
        latest = self._made_of(original, copy)
        return latest is not None and latest.copy.is_intact

    def value_in(self, copy: torch.Tensor, original: torch.Tensor) -> BufferValue | None:
        """What ``copy`` holds unless it was written, if it is what ``place`` last gave for
        ``original``."""
        latest = self._made_of(original, copy)
        return None if latest is None else latest.value

    def _made_of(self, original: torch.Tensor, copy: torch.Tensor) -> _Latest | None:
        latest: _Latest | None = self._latest.get(original)
        return latest if latest is not None and latest.copy.tensor is copy else None

    def has_changed(self, original: torch.Tensor, copy: torch.Tensor) -> bool:
        """Compares values, for copies whose version tells nothing. From then on nobody trusts
        versions of that buffer.

        To be called before the user can have written to the buffer.
        """
        if torch.equal(copy.cpu(), original.cpu()):
            return False
        self._known.of(original).is_written_silently = True
        latest = self._made_of(original, copy)
        if latest is not None:
            self._copies.pop(latest.value, None)
        return True

    def is_written_silently(
        self, original: torch.Tensor, copy: torch.Tensor, training: bool, *, look_again: bool
    ) -> bool:
        """After a stage run's last forward: whether they have written ``copy``, whose version says
        that they have not."""
        known = self._known.of(original)
        if known.is_unclear(training) or (look_again and not known.is_written_silently):
            self.has_changed(original, copy)
        known.compared.add(training)
        return training and known.is_written_silently

    def clear(self) -> None:
        self._latest.clear()
        self._copies.clear()
