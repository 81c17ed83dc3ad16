"""Whole tensors copied between pageable host memory and one device, both ways, through a few
page-locked slices.

As in a ring (`ring.py`, which says why) the host copies one slice while the link carries another.
Knows nothing of what the tensors are for.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from ..device import Event, Lane
from .pinning import HostArena, HostMemory
from .ring import NUM_SLICES, SLICE_BYTES


class Pair(NamedTuple):
    """One tensor's memory on the host and on the device, which is contiguous there."""

    host: torch.Tensor
    there: torch.Tensor


class PinnedCopier:
    """Copies over one lane. ``up`` and ``down`` block until everything is where it belongs.

    Called by any thread, one at a time, whose the slices are until the call ends, but for what the
    lane copies. They are made when a copy first needs them, which one of page-locked memory does
    not.

    Args:
        largest: as many bytes a slice has at most.
    """

    def __init__(self, lane: Lane, memory: HostMemory, largest: int) -> None:
        self.slice_bytes = min(SLICE_BYTES, max(largest, 1))
        self._lane = lane
        self._memory = memory
        self._lock = threading.RLock()
        self._is_busy = False
        self._slices: list[HostArena] = []

    def __repr__(self) -> str:
        return f"<PinnedCopier: {len(self._slices)} slices of {self.slice_bytes / 2**20:.1f} MiB>"

    def up(self, pairs: Sequence[Pair]) -> None:
        """Writes what is on the host to the device."""
        with self._lock:
            staged, direct = self._sorted(pairs)
            for index in direct:
                self._lane.copy_(pairs[index].there, pairs[index].host)
            self._through_slices(pairs, staged, lambda loads: self._fill(pairs, loads))
            if pairs:
                self._lane.record().wait()

    def down(
        self,
        pairs: Sequence[Pair],
        is_wanted: Callable[[int], bool] = lambda _: True,
        arrived: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Writes what is on the device to the host. If it raises, some of that is written.

        Args:
            is_wanted: asked before each write to the host tensor of that index that needs a slice.
            arrived: told when a wanted one is all there, while others are still on their way.
        """
        with self._lock:
            staged, direct = self._sorted(pairs)
            for index in direct:
                self._lane.copy_(*pairs[index])
            if direct:
                self._lane.record().wait()
            for index in direct:
                if is_wanted(index):
                    arrived(index)
            self._through_slices(
                pairs, staged, lambda loads: self._drain(pairs, loads, is_wanted, arrived)
            )

    def close(self) -> None:
        """Gives the slices' memory back. Later copies make new ones."""
        with self._lock:
            if self._slices:
                # Because a call that raised may have left copies under way.
                self._lane.record().wait()
            self._slices = []

    def _sorted(self, pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
        """Which go through slices, and which do not: none does if they are in use, which a signal's
        handler finds that came in the midst of another call of this thread."""
        direct = [
            index
            for index, (host, _) in enumerate(pairs)
            if self._is_busy or not host.is_contiguous() or host.is_pinned()
        ]
        return sorted(set(range(len(pairs))).difference(direct)), direct

    def _through_slices(
        self,
        pairs: Sequence[Pair],
        staged: Sequence[int],
        copy: "Callable[[Iterator[_Load]], None]",
    ) -> None:
        if not staged:
            return
        self._is_busy = True
        try:
            if not self._slices:
                # Because later threads that write to them need not be in that mode.
                with torch.inference_mode(False):
                    self._slices = [
                        self._memory.staging(self.slice_bytes) for _ in range(NUM_SLICES)
                    ]
            self._lane.record().wait()  # because a call that raised may have left copies under way
            copy(_loads(((index, pairs[index].host.nbytes) for index in staged), self.slice_bytes))
        finally:
            self._is_busy = False

    def _fill(self, pairs: Sequence[Pair], loads: "Iterator[_Load]") -> None:
        slices = self._slices
        used: list[Event | None] = [None] * len(slices)
        for number, load in zip(cycle(range(len(slices))), loads, strict=False):
            free = used[number]
            if free is not None:
                free.wait()  # because the lane may still read what was in the slice
            for part in load:
                part.within(slices[number]).copy_(part.of(pairs[part.number].host))
            for part in load:
                self._lane.copy_(part.of(pairs[part.number].there), part.within(slices[number]))
            used[number] = self._lane.record()

    def _drain(
        self,
        pairs: Sequence[Pair],
        loads: "Iterator[_Load]",
        is_wanted: Callable[[int], bool],
        arrived: Callable[[int], None],
    ) -> None:
        idle = list(self._slices)
        under_way: deque[tuple[HostArena, _Load, Event]] = deque()
        while True:
            while idle and (load := next(loads, None)) is not None:
                target = idle.pop()
                for part in load:
                    self._lane.copy_(part.within(target), part.of(pairs[part.number].there))
                under_way.append((target, load, self._lane.record()))
            if not under_way:
                return
            source, load, ready = under_way.popleft()
            ready.wait()
            for part in load:
                if is_wanted(part.number):
                    part.of(pairs[part.number].host).copy_(part.within(source))
                    if part.is_last:
                        arrived(part.number)
            idle.append(source)


class _Part(NamedTuple):
    """Bytes ``start`` to ``stop`` of the tensor of that number, and where they lie in a slice."""

    number: int
    start: int
    stop: int
    is_last: bool
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1).view(torch.uint8)[self.start : self.stop]

    def within(self, arena: HostArena) -> torch.Tensor:
        return arena.bytes[self.offset : self.offset + self.stop - self.start]


_Load = list[_Part]
"""What is in a slice at a time."""


def _loads(tensors: Iterable[tuple[int, int]], slice_bytes: int) -> Iterator[_Load]:
    """Of tensors given by number and bytes. Small ones share a slice, large ones take several."""
    load: _Load = []
    filled = 0
    for index, num_bytes in tensors:
        start, is_last = 0, False
        while not is_last:
            if filled == slice_bytes:
                yield load
                load, filled = [], 0
            stop = min(num_bytes, start + slice_bytes - filled)
            is_last = stop == num_bytes
            load.append(_Part(index, start, stop, is_last, filled))
            start, filled = stop, filled + stop - start
    if load:
        yield load
