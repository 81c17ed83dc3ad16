"""A few page-locked slices that unpinned memory passes through on its way to one device.

A copy from pageable memory is staged by the driver, which keeps the calling thread and reaches a
fraction of what the link carries. Through a ring the host copies one slice while the link carries
the one before; memory-mapped weights are read from their file by exactly this copy and are never
locked, written or kept.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..device import Event, Lane
from .pinning import HostMemory
from .slot_sizes import ALIGNMENT

NUM_SLICES = 3
SLICE_BYTES = 16 * 2**20


class Piece(NamedTuple):
    """Bytes on the host and where they go in a target."""

    offset: int
    content: torch.Tensor  # (bytes,) uint8


class PinnedRing:
    """Copies pieces of host memory to targets of at most ``largest`` bytes, over one lane.

    Used by one thread at a time. A slice is that thread's while it is filled and the lane's from
    the copy until ``free``. Pieces are only read, and no more once ``send`` has returned.
    """

    def __init__(self, lane: Lane, memory: HostMemory, largest: int) -> None:
        self._lane = lane
        self.slice_bytes = min(SLICE_BYTES, max(largest, 1))
        self._slices = [memory.staging(self.slice_bytes) for _ in range(NUM_SLICES)]
        self._free: list[Event | None] = [None] * NUM_SLICES
        self._next = 0

    def __repr__(self) -> str:
        return f"<PinnedRing: {len(self._slices)} slices of {self.slice_bytes / 2**20:.1f} MiB>"

    def send(
        self, target: torch.Tensor, pieces: Sequence[Piece], is_wanted: Callable[[], bool]
    ) -> Event:
        """Queues the copies of pieces, in whatever order, into ``target``.

        Nothing else of ``target`` is written but what aligns neighbouring pieces, which is
        undefined afterwards. Blocks while all slices are under way, so for as long as the lane
        waits for ``target`` to be free. Ends early once ``is_wanted`` says no.

        Returns:
            The event after the last copy.
        """
        for run in _runs(pieces):
            end = run[-1].offset + run[-1].content.numel()
            for start in range(run[0].offset, end, self.slice_bytes):
                if not is_wanted():
                    break
                self._send_slice(target[start : min(start + self.slice_bytes, end)], start, run)
        return self._lane.record()

    def _send_slice(self, target: torch.Tensor, start: int, pieces: Sequence[Piece]) -> None:
        number, self._next = self._next, (self._next + 1) % NUM_SLICES
        free = self._free[number]
        if free is not None:
            free.wait()  # because the lane may still read what was in the slice
        window = self._slices[number].bytes[: target.numel()]
        for offset, content in pieces:
            first, last = max(offset, start), min(offset + content.numel(), start + window.numel())
            if first < last:
                window[first - start : last - start].copy_(content[first - offset : last - offset])
        self._lane.copy_(target, window)
        self._free[number] = self._lane.record()

    def close(self) -> None:
        """Gives the slices' memory back once no copy reads it any more."""
        for free in self._free:
            if free is not None:
                free.wait()
        self._slices.clear()


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours together, so that small pieces share a slice."""
    run: list[Piece] = []
    filled = (piece for piece in pieces if piece.content.numel())
    for piece in sorted(filled, key=lambda piece: piece.offset):
        if run and piece.offset > _aligned(run[-1].offset + run[-1].content.numel()):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
