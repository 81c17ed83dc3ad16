"""Page-locked host memory of exactly the size asked for. Knows nothing of parameters."""

import logging
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from ..errors import ConfigError

PinMode = Literal["alloc", "register", "off"]
_PAGE = mmap.PAGESIZE
_log = logging.getLogger("roundpipe")


class _Memory(mmap.mmap):
    """Anonymous memory that unlocks its pages before the system takes it back."""

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
            return torch.empty(tuple(shape), dtype=dtype)
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
        self._registered: list[int] = []

    def arena(self, num_bytes: int) -> HostArena:
        """New memory, page-locked unless pinning is off, useless or refused by the system."""
        return HostArena(num_bytes, lock=self._locks_buffers)

    def staging(self, num_bytes: int) -> HostArena:
        """New memory of the engine's own that weights pass through, page-locked whatever becomes of the model's."""
        return HostArena(num_bytes, lock=self.is_accelerated)

    def lock_in_place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Page-locks the memory under ``tensors``; pages that several share are locked once."""
        if not self._locks_in_place:
            return
        for start, end in _page_ranges(tensors):
            if _lock_pages(start, end - start):
                self._registered.append(start)

    def close(self) -> None:
        """Unlocks what was locked in place. The memory itself is its owner's."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())


def _page_ranges(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes)
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        start, end = start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


_refused = False


def _lock_pages(address: int, num_bytes: int) -> bool:
    """Page-locks for all devices. Says once when the system refuses, since transfers are then several times slower."""
    global _refused
    if _refused:
        return False
    error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 1)  # 1: portable, for every device
    if int(error) != 0:
        _refused = True
        _log.warning(
            "the system refused to page-lock %d bytes (%s); going on unpinned, transfers are slower", num_bytes, error
        )
    return not _refused
