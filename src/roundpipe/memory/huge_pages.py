"""Memory for what every step reads and writes in full: in pages of 2 MiB, and not for forked
processes.

With pages of 4 KiB such a pass spends a fifth of its time looking up where they are. And after a
fork (data loaders make some) whoever writes to a page first gets a copy of it, so that soon there
would be two of everything. A forked process that reads such memory is killed; it is the
optimizer's, whose thread does not exist there either.
"""

import contextlib
import functools
import gc
import math
import mmap
import os
from collections.abc import Sequence
from typing import TypeVar

import torch

_PAGE = 2 << 20
Mapping = TypeVar("Mapping", bound=mmap.mmap)
_IS_LINUX = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTFORK")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory with arbitrary content, freed with the tensor. Ordinary if it is small or the
    system is not Linux."""
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if not are_worth_it(num_bytes):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    memory, offset = mapping(num_bytes, mmap.mmap)
    # `data`, because a view would keep the flat tensor, and with it a second way to the memory.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(tuple(shape)).data


def are_worth_it(num_bytes: int) -> bool:
    return num_bytes >= _PAGE and _IS_LINUX


def mapping(num_bytes: int, kind: type[Mapping]) -> tuple[Mapping, int]:
    """Returns a mapping of its own, because advice outlives what malloc is given back, and the
    offset of ``num_bytes`` in it that begin at a page: it is a page longer for that."""
    memory = kind(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    offset = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _PAGE
    memory.madvise(mmap.MADV_DONTFORK)
    keep_forks_from_unmapping()
    with contextlib.suppress(OSError):  # a system without large pages
        # Whole ones: it takes no byte more.
        memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes // _PAGE * _PAGE)
    return memory, offset


@functools.cache
def keep_forks_from_unmapping() -> None:
    """Because a forked process that collected what was garbage before would unmap where a mapping
    was, whatever it has put there since."""
    os.register_at_fork(after_in_child=gc.freeze)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Makes zeros as `empty` makes memory. Pages come when they are first written to: moments that
    go to a device before that take none, and an update makes those of others in its threads."""
    made = empty(shape, dtype)
    # A mapping of its own is zeros already.
    return made if are_worth_it(made.nbytes) else made.zero_()
