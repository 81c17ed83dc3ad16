"""Who last touched which memory, in a time that counts lanes' events. Only the adversarial device
asks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Ticks = dict[int, int]
"""By lane number: everything that lane did up to this tick is known to be done."""
Known = tuple[Mapping[int, int], ...]
"""Ticks from several sources, each of which counts. Not merged, because they cover every
lane there ever was."""

Span = tuple[int, int]
"""The addresses from which and up to which a tensor lies."""

_PURGE_ABOVE = 4096


class Access(NamedTuple):
    """A lane, by number, and its tick at that time."""

    lane: int
    tick: int

    def is_before(self, known: Known) -> bool:
        """Whether somebody who knows so much comes after this access for certain."""
        return any(ticks.get(self.lane, -1) >= self.tick for ticks in known)


class Memory:
    """One storage.

    ``home``: the device it lives on, None if no lane made it. ``made_by``: the lane it was
    allocated on.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = StorageWeakRef(storage)
        self.home: Any = None
        self.made_by: int | None = None
        self.written: Access | None = None
        self.read: Ticks = {}
        self.borrowed_by: set[int] = set()

    @property
    def is_gone(self) -> bool:
        return bool(self._storage.expired())

    def reaches(self, known: Known) -> bool:
        """Whether what was written is there for somebody who knows so much."""
        return self.written is None or self.written.is_before(known)

    def is_left(self, known: Known) -> bool:
        """Whether, besides, all who read it have done so: it may be written again."""
        return self.reaches(known) and all(
            Access(*item).is_before(known) for item in self.read.items()
        )


class Ledger:
    """All memory that lanes touched and that still exists. The caller holds a lock."""

    def __init__(self) -> None:
        self._memory: dict[int, Memory] = {}

    def __len__(self) -> int:
        return len(self._memory)

    def of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            if len(self._memory) > _PURGE_ABOVE:
                self._memory = {
                    key: memory for key, memory in self._memory.items() if not memory.is_gone
                }
            # A weak reference keeps the key from being given to another storage.
            memory = self._memory[storage._cdata] = Memory(storage)
        return memory


ledger = Ledger()
"""Of all devices together; guarded by their one lock."""


def is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether anything but this tensor object keeps its memory alive."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # the tensor and `storage`


def overlap(one: Span, other: Span) -> bool:
    """Whether two tensors may share bytes, also when they have a storage each over one block of
    memory."""
    return one[0] < other[1] and other[0] < one[1]


def span(tensor: torch.Tensor) -> Span:
    """Where its bytes lie."""
    if tensor.numel() == 0:
        return 0, 0
    reach = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def poison(tensor: torch.Tensor) -> None:
    """Fills with all bits set: NaN in every floating dtype, -1 in the signed ones."""
    with torch.no_grad():
        if tensor.is_contiguous() and tensor.numel():
            tensor.detach().view(-1).view(torch.uint8).fill_(255)
        elif tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))
        else:
            tensor.detach().fill_(1 if tensor.dtype is torch.bool else -1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes, to be compared."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
