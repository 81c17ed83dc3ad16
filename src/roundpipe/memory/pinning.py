"""Page-locked host memory of exactly the size asked for. Knows nothing of parameters."""

import contextlib
import logging
import math
import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from ..errors import ConfigError

PinMode = Literal["alloc", "register", "off"]
_PAGE = mmap.PAGESIZE
_log = logging.getLogger("roundpipe")


class _Memory(mmap.mmap):
    """Anonymous memory that unlocks its pages before the system takes it back.

    Shared with forked processes, which is mmap's default: of private pages whoever writes first after a fork (a data
    loader makes some) gets a copy, and devices would go on with the old ones.
    """

    locked_at: int = 0

    def __del__(self) -> None:
        if self.locked_at:
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)


class HostArena:
    """One block of host memory, handed out as tensors that each have a storage of their own.

    The memory lives as long as any of those tensors.
    """

    def __init__(self, num_bytes: int, *, lock: bool) -> None:
        self.num_bytes = num_bytes
        self._memory = _Memory(-1, max(num_bytes, 1))
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8, count=max(num_bytes, 1))[:num_bytes]
        if lock and num_bytes and _lock_pages(self.bytes.data_ptr(), num_bytes):
            self._memory.locked_at = self.bytes.data_ptr()

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of ``shape`` at byte ``offset``, over exactly its own storage."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))


class HostMemory:
    """How an engine's host memory is pinned.

    Args:
        mode: ``"alloc"`` new page-locked memory; ``"register"`` pages locked where they are; ``"off"`` neither.
        accelerated: whether any device can use page-locked memory at all.
    """

    def __init__(self, mode: PinMode, *, accelerated: bool) -> None:
        if mode not in ("alloc", "register", "off"):
            raise ConfigError(f"pin_model is {mode!r}; use 'alloc', 'register' or 'off'")
        self.is_accelerated = accelerated
        self.rehomes = mode == "alloc" and accelerated
        self._locks_in_place = mode == "register" and accelerated
        self._locks_buffers = mode != "off" and accelerated
        self.needs_staging = mode == "off"
        self._locked: list[_Pages] = []
        # An engine that is never closed must not leave pages locked: CUDA would take what lies there later for them.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def arena(self, num_bytes: int) -> HostArena:
        """New memory, page-locked unless pinning is off, useless or refused by the system."""
        return HostArena(num_bytes, lock=self._locks_buffers)

    def staging(self, num_bytes: int) -> HostArena:
        """New memory of the engine's own that weights and optimizer state pass through, page-locked whatever becomes of
        the model's."""
        return HostArena(num_bytes, lock=self.is_accelerated)

    def lock_in_place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Page-locks the memory under ``tensors``; pages that several share are locked once."""
        if not self._locks_in_place:
            return
        for pages in _pages_of(tensors):
            if _lock_pages(pages.start, pages.end - pages.start):
                self._locked.append(pages)

    def close(self) -> None:
        """Unlocks what was locked in place. The memory itself is its owner's."""
        _unlock(self._locked)


class _Pages(NamedTuple):
    """Whole pages. ``inside``: the tensors there, which keep the pages from being freed while they are locked."""

    start: int
    end: int
    inside: list[torch.Tensor]


def _unlock(locked: list[_Pages]) -> None:
    while locked:
        pages = locked.pop()
        torch.cuda.cudart().cudaHostUnregister(pages.start)


def _pages_of(tensors: Iterable[torch.Tensor]) -> list[_Pages]:
    """Without gaps, and none twice."""
    found: list[_Pages] = []
    for tensor in sorted((t for t in tensors if t.nbytes), key=torch.Tensor.data_ptr):
        start = tensor.data_ptr() // _PAGE * _PAGE
        end = -(-(tensor.data_ptr() + tensor.nbytes) // _PAGE) * _PAGE
        if found and start <= found[-1].end:
            found[-1].inside.append(tensor)
            found[-1] = found[-1]._replace(end=max(end, found[-1].end))
        else:
            found.append(_Pages(start, end, [tensor]))
    return found


_refused = False
_LOCKED_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


def _lock_pages(address: int, num_bytes: int) -> bool:
    """Page-locks for all devices; whether the pages are the caller's to unlock.

    Says once when the system refuses, since transfers are then several times slower. Pages that somebody else has
    locked, another engine over neighbouring weights perhaps, stay his: that is no refusal.
    """
    global _refused
    if _refused:
        return False
    error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 1)  # 1: portable, for every device
    if int(error) == 0:
        return True
    _take_back_error()
    if int(error) != _LOCKED_ALREADY:
        _refused = True
        _log.warning(
            "the system refused to page-lock %d bytes (%s); going on unpinned, transfers are slower", num_bytes, error
        )
    return False


def _take_back_error() -> None:
    """CUDA keeps a thread's last error until somebody asks, which torch does only after launching a kernel: the next
    one of this thread would be said to have failed."""
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")
