"""Advice about pages of mapped files: read them before somebody needs them, let them go behind.

No advice changes a value, also not of pages that this process has written: those are its own, and
go to swap at most. Advice that the system does not know is ignored.
"""

import ctypes
import errno
import mmap
import os
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from ..system.host_memory import free_host_bytes
from .mmap import FileMapping

# Linux's numbers, which Python has no names for.
_COLD, _PAGEOUT, _POPULATE_READ, _POPULATE_WRITE = 20, 21, 22, 23
_HWPOISON = 133  # an error
_WILLNEED_BYTES = 1 << 20  # because the system reads only so much for one advice
_PAGE = mmap.PAGESIZE


class Stretch(NamedTuple):
    """The bytes of one tensor in a mapped file."""

    start: int
    num_bytes: int
    path: str

    @classmethod
    def of(cls, tensor: torch.Tensor, mapping: FileMapping) -> "Stretch":
        return cls(tensor.data_ptr(), tensor.nbytes, mapping.path)


class PageCache:
    """Talks to the system. Used by any thread."""

    def __init__(self) -> None:
        self._populates = True
        self._may_drop: dict[str, bool] = {}

    def room(self) -> int:
        """Bytes that this process could have in memory beside what it has; pages of files that can
        be dropped count as free."""
        return free_host_bytes()

    def read(self, start: int, num_bytes: int, *, for_writing: bool = False) -> bool:
        """Brings pages into memory and into this process's page tables; False if the file has none
        there. Blocks until they are there.

        ``for_writing``: they are about to be written, and count as written from here on.
        """
        first, size = _pages(start, num_bytes)
        if self._populates:
            error = self._advise(first, size, _POPULATE_WRITE if for_writing else _POPULATE_READ)
            if error != errno.EINVAL:
                return error not in (errno.EFAULT, _HWPOISON)
            self._populates = False
        for offset in range(0, size, _WILLNEED_BYTES):
            self._advise(first + offset, min(_WILLNEED_BYTES, size - offset), mmap.MADV_WILLNEED)
        return True

    def let_go(self, stretch: Stretch) -> None:
        """Takes pages out of memory that only this process has mapped. Those at the edges may be
        neighbours' too, and stay."""
        first = -(-stretch.start // _PAGE) * _PAGE
        size = (stretch.start + stretch.num_bytes) // _PAGE * _PAGE - first
        if size > 0:
            self._advise(first, size, _PAGEOUT if self._drops(stretch.path) else _COLD)

    def unmap(self, start: int, num_bytes: int) -> None:
        """Takes pages of a shared mapping out of this process's page tables, which loses
        nothing: the file has what was written."""
        self._advise(start, num_bytes, mmap.MADV_DONTNEED)

    def _drops(self, path: str) -> bool:
        if path not in self._may_drop:
            try:
                is_own = os.geteuid() in (0, Path(path).stat().st_uid)
            except OSError:
                is_own = False
            self._may_drop[path] = is_own or os.access(path, os.W_OK)
        return self._may_drop[path]

    def _advise(self, start: int, num_bytes: int, advice: int) -> int:
        return 0 if self._madvise(start, num_bytes, advice) == 0 else ctypes.get_errno()

    @cached_property
    def _madvise(self) -> "ctypes._NamedFuncPointer":
        function = ctypes.CDLL(None, use_errno=True).madvise
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return function


def _pages(start: int, num_bytes: int) -> tuple[int, int]:
    first = start // _PAGE * _PAGE
    return first, start + num_bytes - first
