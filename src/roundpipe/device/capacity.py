"""What lives on a virtual device that has a size: counted where it is made, refused where it does
not fit any more.

[Note: counted memory] An accelerator's allocator sees every tensor. Here a dispatch mode sees what
a thread computes inside of a lane's ``work``, which is how everything on a device is made: slots,
activations, graphs, sums, boundaries. Each new storage counts from there until it is freed, whoever
holds it. A host copy that a worker makes in ``work`` counts too, because both are memory of the
CPU; what is inside of tensor subclasses does not. On devices with a size each operation takes some
tens of microseconds more, and torch.compile leaves code as it is.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch


class VirtualMemory:
    """One device's memory. Any thread may call it.

    Args:
        name: the device's.
        num_bytes: what fits.
        settle: finishes what still holds on to freed memory; tried before an allocation is refused.
    """

    def __init__(
        self, name: str, num_bytes: int, settle: Callable[[], None] = lambda: None
    ) -> None:
        self.num_bytes = num_bytes
        self.used = 0
        self.peak = 0
        self._name = name
        self._settle = settle
        self._alive: dict[int, int] = {}  # bytes, by the address of what torch keeps of a storage
        # Held for a few lines only. One that can be taken twice, because a collection may free
        # storages inside.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return (
            f"<Capacity {self._name}: {self.used} of {self.num_bytes} bytes used, "
            f"{self.peak} at most>"
        )

    def count(self, operation: Any, given: Any, made: Any) -> None:
        """Notes what an operation has made of the tensors it was ``given``.

        Raises:
            torch.OutOfMemoryError: it does not fit. Nothing of it counts; the caller lets go of it.
        """
        if operation.is_view:
            return
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage.nbytes():
                self._add(storage)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._alive:
                return
            is_full = self.used + num_bytes > self.num_bytes
        if is_full:
            self._settle()
        with self._lock:
            if self.used + num_bytes > self.num_bytes:
                raise torch.OutOfMemoryError(
                    f"{self._name} is out of memory. Tried to allocate {num_bytes} bytes; "
                    f"{self.used} of its {self.num_bytes} bytes are in use"
                )
            self._alive[key] = num_bytes
            self.used += num_bytes
            self.peak = max(self.peak, self.used)
        # torch keeps a storage's Python object for as long as the storage itself.
        weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        with self._lock:
            self.used -= self._alive.pop(key)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those with a storage in what an operation takes or returns."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
