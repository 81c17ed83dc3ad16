"""Host memory for tensors that leave a device for a while. Knows nothing of what they are."""

import threading

import torch

from ..device import Event
from .pinning import HostArena, HostMemory

_PAGE = 4096


class HostBlock:
    """Room for one tensor. Goes back to where it came from when nobody holds it any more.

    ``free``: whoever writes makes its lane wait for it first; whoever has queued a copy from or to
    here sets it.
    """

    def __init__(self, arena: HostArena, free: Event | None, home: "HostBlocks") -> None:
        self.free = free
        self._arena = arena
        self._home = home

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the block with the shape, strides and dtype of one that is dense."""
        flat = self._arena.tensor(0, (tensor.numel(),), tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def __del__(self) -> None:
        self._home._take_back(self._arena, self.free)


class HostBlocks:
    """Blocks by size, used again and again, because to page-lock memory is slow. Any thread may
    call it."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        # Because workers take blocks, and whoever lets go of one last gives it back: perhaps a
        # garbage collection, that comes while its own thread is inside.
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[HostArena, Event | None]]] = {}
        self.num_bytes = 0

    def __repr__(self) -> str:
        free = sum(map(len, list(self._free.values())))
        return f"<HostBlocks: {self.num_bytes / 2**20:.1f} MiB, {free} free>"

    def take(self, num_bytes: int) -> HostBlock:
        size = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        with self._lock:
            if free := self._free.get(size):
                return HostBlock(*free.pop(), self)
            self.num_bytes += size
        return HostBlock(self._memory.buffer(size), None, self)

    def _take_back(self, arena: HostArena, free: Event | None) -> None:
        with self._lock:
            self._free.setdefault(arena.num_bytes, []).append((arena, free))

    def clear(self) -> None:
        """Lets go of all free blocks once no lane uses them any more."""
        with self._lock:
            dropped, self._free = self._free, {}
            self.num_bytes = 0
        for blocks in dropped.values():
            for _, free in blocks:
                if free is not None:
                    free.wait()
