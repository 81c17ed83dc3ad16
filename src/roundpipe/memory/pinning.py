"""Page-locked host memory of exactly the size asked for. Knows nothing of parameters."""

import contextlib
import ctypes
import logging
import math
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch

from ..errors import ConfigError
from ..system.cores import usable_cores
from . import huge_pages

PinMode = Literal["alloc", "register", "off"]
_PAGE = mmap.PAGESIZE
# CUDA sends what is smaller along with the command, so locking it gains nothing.
_LEAST_BYTES = 64 << 10
# That a thread makes the pages of: few large ones, and small enough that a layer's gradients, which
# the first backward waits for, are made by all cores.
_PIECE = 8 << 20
_log = logging.getLogger("roundpipe")


class _Memory(mmap.mmap):
    """Anonymous memory that unlocks its pages before the system takes it back."""

    locked_at: int = 0

    def __del__(self) -> None:
        if self.locked_at:
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)


class HostArena:
    """One block of host memory, handed out as tensors that each have a storage of their own.

    The memory lives as long as any of those tensors. Forked processes (data loaders make some)
    share it: of pages that are both's until one writes, whoever writes first gets a copy, and
    devices would go on with the old ones. With ``is_ours``, because nobody else reads it, they do
    not get it at all, and it lies in large pages.
    """

    def __init__(self, num_bytes: int, *, lock: bool, is_ours: bool = False) -> None:
        self.num_bytes = num_bytes
        self._begin = 0
        if is_ours and huge_pages.are_worth_it(num_bytes):
            self._memory, self._begin = huge_pages.mapping(num_bytes, _Memory)
        else:
            self._memory = _Memory(-1, max(num_bytes, 1))
        self.bytes = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=max(num_bytes, 1), offset=self._begin
        )[:num_bytes]
        if lock and num_bytes and not _refused:
            _make_pages(self.bytes.data_ptr(), num_bytes)
            if _lock_pages(self.bytes.data_ptr(), num_bytes):
                self._memory.locked_at = self.bytes.data_ptr()

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of ``shape`` at byte ``offset``, over exactly its own storage."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        begin = self._begin + offset
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin).view(
            tuple(shape)
        )


def _make_pages(address: int, num_bytes: int) -> None:
    """By several threads, because locking makes them one by one: 2.1 GB/s, and 4.3 after this; in
    large pages 4.1 and 17."""
    pieces = [(at, min(_PIECE, num_bytes - at)) for at in range(0, num_bytes, _PIECE)]
    num_threads = min(len(pieces), usable_cores())
    if num_threads > 1:
        with ThreadPoolExecutor(num_threads) as threads:
            for at, size in pieces:
                threads.submit(ctypes.memset, address + at, 0, size)


class HostMemory:
    """How an engine's host memory is pinned.

    Args:
        mode: ``"alloc"`` new page-locked memory; ``"register"`` pages locked where they are;
            ``"off"`` neither.
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
        self.leaves_weights = mode == "off" or not accelerated  # where they are, and pageable
        self._locked: list[_Pages] = []
        # An engine that is never closed must not leave pages locked: CUDA would take what lies
        # there later for them.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    def arena(self, num_bytes: int) -> HostArena:
        """New memory for weights that users hold, page-locked unless pinning is off, useless or
        refused by the system."""
        return HostArena(num_bytes, lock=self._locks_buffers)

    def buffer(self, num_bytes: int) -> HostArena:
        """As `arena`, for what only the engine looks at."""
        return HostArena(num_bytes, lock=self._locks_buffers, is_ours=True)

    def staging(self, num_bytes: int) -> HostArena:
        """As `buffer`, for what weights and optimizer state pass through: page-locked whatever
        becomes of the model's."""
        return HostArena(num_bytes, lock=self.is_accelerated, is_ours=True)

    def lock_in_place(self, tensors: Iterable[torch.Tensor]) -> None:
        """Page-locks the memory under ``tensors``, but for edges that they may share with others.

        [Note: locked in place] CUDA refuses to copy what begins in locked pages and ends outside,
        and copies as pageable what begins outside. So whatever else lies in the first or last page
        of a weight, a batch perhaps, could not be copied any more if that page were locked. Hence
        only pages after the first that are the tensor's alone are locked; the tensor as a whole can
        then still be copied by anybody, and `copies` has its locked part copied on its own. Who
        copies a slice from the midst of a weight to its end has to clone it first.
        """
        if not self._locks_in_place:
            return
        for tensor in tensors:
            first, last = _own_pages(tensor)
            if last > first and _lock_pages(tensor.data_ptr() + first, last - first):
                self._locked.append(_Pages(tensor.data_ptr() + first, tensor))

    def copies(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy to have ``source``, on the host, in a contiguous ``target``: see [Note:
        locked in place]."""
        first, last = _own_pages(source) if self._locks_in_place else (0, 0)
        if first == last:
            yield target, source
            return
        there, here = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
        for part in (slice(first), slice(first, last), slice(last, None)):
            yield there[part], here[part]

    def close(self) -> None:
        """Unlocks what was locked in place. The memory itself is its owner's."""
        _unlock(self._locked)


class _Pages(NamedTuple):
    """``inside``: the tensor there, which keeps the pages from being freed while they are
    locked."""

    start: int
    inside: torch.Tensor


def _unlock(locked: list[_Pages]) -> None:
    while locked:
        pages = locked.pop()
        torch.cuda.cudart().cudaHostUnregister(pages.start)


def _own_pages(tensor: torch.Tensor) -> tuple[int, int]:
    """From which byte of the tensor to which its pages are locked in place: (0, 0) for none."""
    if tensor.nbytes < _LEAST_BYTES or not tensor.is_contiguous():
        return 0, 0
    address = tensor.data_ptr()
    return _PAGE - address % _PAGE, tensor.nbytes - (address + tensor.nbytes) % _PAGE


_refused = False
_LOCKED_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


def _lock_pages(address: int, num_bytes: int) -> bool:
    """Page-locks for all devices; whether the pages are the caller's to unlock.

    Says once when the system refuses, since transfers are then several times slower. Pages that
    somebody else has locked, another engine over neighbouring weights perhaps, stay his: that is no
    refusal.
    """
    global _refused
    if _refused:
        return False
    # 1: portable, for every device.
    error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 1)
    if int(error) == 0:
        return True
    _take_back_error()
    if int(error) != _LOCKED_ALREADY:
        _refused = True
        _log.warning(
            "the system refused to page-lock %d bytes (%s); going on unpinned, transfers are "
            "slower",
            num_bytes,
            error,
        )
    return False


def _take_back_error() -> None:
    """CUDA keeps a thread's last error until somebody asks, which torch does only after launching a
    kernel: the next one of this thread would be said to have failed."""
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")
