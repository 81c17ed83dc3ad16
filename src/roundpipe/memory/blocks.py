"""Host memory for tensors that leave a device for a while. Knows nothing of what they are."""

import threading
from collections import deque
from typing import NamedTuple

import torch

from ..device import Event
from .pinning import HostArena, HostMemory

_PAGE = 4096
# Lengths of batches waver, and to make what was just given back is slow: how much larger than what
# is asked for a block may be, calls that are remembered, and how much more than they wanted there
# may be. With random lengths some calls in a hundred make blocks then.
_LARGEST_FIT, _CALLS_REMEMBERED, _SLACK = 8, 32, 1.25


class _Free(NamedTuple):
    """A block's memory, and when the lane that used it last is done with it."""

    arena: HostArena
    free: Event | None


class HostBlock:
    """Room for one tensor. Goes back to where it came from when nobody holds it any more.

    ``free``: whoever writes makes its lane wait for it first; whoever has queued a copy from or to
    here sets it.
    """

    def __init__(self, kept: _Free, home: "HostBlocks", sure_bytes: int) -> None:
        self._arena, self.free = kept
        self._home = home
        self._sure_bytes = sure_bytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in the block with the shape, strides and dtype of one that is dense."""
        flat = self._arena.tensor(0, (tensor.numel(),), tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def __del__(self) -> None:
        self._home._take_back(_Free(self._arena, self.free), self._sure_bytes)


class HostBlocks:
    """Blocks that are used again and again, because to page-lock memory is slow. Any thread may
    call it.

    No more of them are free than calls have wanted of late: what a first plan, made of guesses,
    needed, or batches of another length, is given back.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        # Because workers take blocks, and whoever lets go of one last gives it back: perhaps a
        # garbage collection, that comes while its own thread is inside.
        self._lock = threading.RLock()
        # By size, those sizes first that were asked for longest ago.
        self._free: dict[int, list[_Free]] = {}
        self._in_use = 0
        self._sure_in_use = 0  # what calls that were sure of their needs have asked for of that
        self._is_sure = False  # the latest call
        self._wanted: deque[float] = deque(maxlen=_CALLS_REMEMBERED)
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"<HostBlocks: {self.num_bytes / 2**20:.1f} MiB, {self._num_free} free>"

    @property
    def _num_free(self) -> int:
        return sum(map(len, list(self._free.values())))

    def take(self, num_bytes: int) -> HostBlock:
        size = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        with self._lock:
            sure = size if self._is_sure else 0
            fitting = [each for each in self._free if size <= each <= _LARGEST_FIT * size]
            if fitting:
                found = min(fitting)
                free = self._free.pop(found)
                block = HostBlock(free.pop(), self, sure)
                if free:
                    self._free[found] = free
                self._in_use += found
                self._sure_in_use += sure
                return block
            self._in_use += size
            self._sure_in_use += sure
            most = max([self._in_use, *(_SLACK * wanted for wanted in self._wanted)])
            dropped = self._drop_beyond(most - size)
            self.num_bytes += size
        _let_go(dropped)
        return HostBlock(_Free(self._memory.buffer(size), None), self, sure)

    def expect(self, num_bytes: float, *, is_sure: bool) -> None:
        """A call comes that will use so many bytes. Lets go of what neither it nor one of the calls
        before needs, once no lane uses that any more.

        Args:
            is_sure: that is known, so it tells something of the calls to come.
        """
        with self._lock:
            most = max([self._in_use + num_bytes, *self._wanted])
            self._is_sure = is_sure
            if is_sure:
                # Together, because several forwards may keep theirs until the first backward.
                self._wanted.append(self._sure_in_use + num_bytes)
            dropped = self._drop_beyond(most) if self.num_bytes > _SLACK * most else []
        _let_go(dropped)

    def shrink(self) -> None:
        """Lets go of what nobody holds and no call that was sure of its needs has wanted."""
        with self._lock:
            most = max([self._in_use, *self._wanted])
            dropped = self._drop_beyond(most) if self.num_bytes > _SLACK * most else []
        _let_go(dropped)

    def _drop_beyond(self, num_bytes: float) -> "list[_Free]":
        """Takes free blocks out until there are no more bytes than that, if so many are free."""
        dropped = []
        while self._free and self.num_bytes > num_bytes:
            size, free = next(iter(self._free.items()))
            dropped.append(free.pop())
            self.num_bytes -= size
            if not free:
                del self._free[size]
        return dropped

    def _take_back(self, kept: _Free, sure_bytes: int) -> None:
        size = kept.arena.num_bytes
        with self._lock:
            self._in_use -= size
            self._sure_in_use -= sure_bytes
            self._free.setdefault(size, []).append(kept)

    def clear(self) -> None:
        """Lets go of all free blocks once no lane uses them any more."""
        with self._lock:
            dropped = self._drop_beyond(0)
        _let_go(dropped)


def _let_go(blocks: "list[_Free]") -> None:
    """Outside the lock, because it waits for lanes and unlocks pages."""
    for block in blocks:
        if block.free is not None:
            block.free.wait()
