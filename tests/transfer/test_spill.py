"""A worker runs only so far ahead of the copies of kept inputs as there is memory for: it is in
use until they are done."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from roundpipe.device import VirtualDevice
from roundpipe.memory.blocks import HostBlocks
from roundpipe.memory.pinning import HostMemory
from roundpipe.transfer.boundaries import Boundary, boundary_of
from roundpipe.transfer.spill import Spills


class NotedEvent:
    """The point on a lane after so many pieces of work; notes that somebody has waited for it."""

    def __init__(self, lane: "NotedLane", position: int) -> None:
        self._lane, self._position = lane, position

    def wait(self) -> None:
        self._lane.done = max(self._lane.done, self._position)


class NotedLane:
    """Its work is done only as far as somebody waits for it."""

    def __init__(self) -> None:
        self.queued = self.done = 0

    def copy_(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queued += 1
        target.copy_(source)

    def record(self) -> NotedEvent:
        return NotedEvent(self, self.queued)

    def wait(self, event: Any) -> None:
        return

    def borrow(self, tensor: torch.Tensor) -> None:
        return

    def work(self) -> AbstractContextManager[None]:
        return nullcontext()


class NotedDevice(VirtualDevice):
    compute: Any
    up: Any
    down: Any

    def __init__(self) -> None:
        super().__init__(0)
        self.compute, self.up, self.down = NotedLane(), NotedLane(), NotedLane()


@pytest.fixture
def device() -> NotedDevice:
    return NotedDevice()


@pytest.fixture
def spills(device: NotedDevice) -> Spills:
    return Spills(device, HostBlocks(HostMemory("alloc", accelerated=False)))


def made_on(device: NotedDevice) -> Boundary:
    return boundary_of(torch.ones(4), device, device.compute.record())


@pytest.mark.parametrize("layers", [1, 3])
def test_copies_of_two_microbatches_are_on_their_way_down(
    layers: int, device: NotedDevice, spills: Spills
) -> None:
    for microbatch in range(6):
        spills.begin()
        assert device.down.done == max(microbatch - 1, 0) * layers
        for _ in range(layers):
            spills.send(made_on(device))


def test_three_inputs_are_back(device: NotedDevice, spills: Spills) -> None:
    """The one that is computed with, the next, and the one after, whose copy is queued before the
    next is used."""
    kept = [spills.send(made_on(device)) for _ in range(6)]
    spills.fetch(kept[0])
    for microbatch in range(6):
        if microbatch + 1 < len(kept):
            spills.fetch(kept[microbatch + 1])
            assert device.up.queued - device.compute.done <= 3
        device.compute.queued += 1  # the recompute and backward
    assert device.up.queued == 6


def test_what_stays_is_neither_sent_nor_waited_for(device: NotedDevice, spills: Spills) -> None:
    boundary = boundary_of(torch.ones(4, dtype=torch.int64), device, device.compute.record())
    device.compute.queued = 5
    assert spills.fetch(spills.send(boundary)) is boundary
    assert (device.down.queued, device.compute.done) == (0, 0)
