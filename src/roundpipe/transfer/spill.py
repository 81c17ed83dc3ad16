"""Kept inputs that a device has no room for: to the host behind the forward, and back ahead of
their recompute.

[Note: spilling] The schedule says which layers' inputs are spilled and when each is fetched. A copy
down runs beside the computes that follow; a copy up is issued one microbatch ahead, on whichever
device has the backward stage run. Only what is a layer's own is moved: masks and the like, which
pass through all layers, are one tensor in every kept input.

A worker runs ahead of its lanes, and memory that is copied is free only when the copy is done. So
it waits here: copies of two microbatches at most are on their way down, and three inputs at most
are back.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..device import Device, Event
from ..memory.blocks import HostBlock, HostBlocks
from .boundaries import Boundary, bring


class Spilled(NamedTuple):
    """On the host once ``ready`` is reached. ``rest`` has None where ``blocks`` has a tensor, with
    a model of it."""

    rest: Boundary
    blocks: dict[int, tuple[HostBlock, torch.Tensor]]
    ready: Event


class Fetched(NamedTuple):
    """On a device again once ``ready`` is reached. ``rest`` has None where ``leaves`` has a
    tensor."""

    rest: Boundary
    leaves: dict[int, torch.Tensor]
    ready: Event


KeptInput = Boundary | Spilled | Fetched


class Spills:
    """One device's inputs on their way down and up again, of all engines that share it. Used by its
    worker."""

    def __init__(self, device: Device, blocks: HostBlocks) -> None:
        self._device = device
        self._blocks = blocks
        self._sent: Event | None = None  # the latest copy down of the microbatch that runs
        self._sent_before: Event | None = None  # of the one before
        self._used: Event | None = None  # what was being computed when the last fetch was queued

    def begin(self) -> None:
        """A microbatch goes forward. Blocks until what the last but one has sent is down."""
        if self._sent_before is not None:
            self._sent_before.wait()
        self._sent_before, self._sent = self._sent, None

    def send(self, boundary: Boundary) -> KeptInput:
        """Sends what the compute lane has just made down; the device's memory is free when the
        copies are done."""
        device, chosen = self._device, list(_own(boundary))
        if not chosen or boundary.ready is None:
            return boundary
        leaves, waiting = list(boundary.leaves), {}
        device.down.wait(boundary.ready)
        for index in chosen:
            leaf, leaves[index] = leaves[index], None
            block = self._blocks.take(leaf.nbytes)
            if block.free is not None:
                device.down.wait(block.free)
            waiting[index] = block, block.like(leaf)
            device.down.copy_(waiting[index][1], leaf)
            device.down.borrow(leaf)
            block.free = device.down.record()
        self._sent = device.down.record()
        return Spilled(boundary._replace(leaves=tuple(leaves)), waiting, self._sent)

    def fetch(self, kept: KeptInput) -> KeptInput:
        """Starts bringing a spilled input to the device. Blocks until the computation is over that
        was the latest when the fetch before this was queued."""
        if not isinstance(kept, Spilled):
            return kept
        if self._used is not None:
            self._used.wait()
        device, leaves = self._device, {}
        self._used = device.compute.record()
        device.up.wait(kept.ready)
        for index, (block, waiting) in kept.blocks.items():
            with device.up.work():
                leaves[index] = torch.empty_strided(
                    waiting.shape, waiting.stride(), dtype=waiting.dtype, device=device.torch_device
                )
            device.up.copy_(leaves[index], waiting)
            device.compute.borrow(leaves[index])
            block.free = device.up.record()
        return Fetched(kept.rest, leaves, device.up.record())

    def restored(self, kept: KeptInput) -> Boundary:
        """The input as the device's compute lane may use it."""
        device, kept = self._device, self.fetch(kept)
        assert not isinstance(kept, Spilled)
        rest = kept.rest if isinstance(kept, Fetched) else kept
        leaves = list(bring(rest.leaves, rest.source, rest.ready, device))
        if isinstance(kept, Fetched):
            device.compute.wait(kept.ready)
            for index, leaf in kept.leaves.items():
                leaves[index] = leaf
        return rest._replace(leaves=tuple(leaves))


def _own(boundary: Boundary) -> Iterator[int]:
    """The leaves that a gradient flows back through; if none does, those that could be
    activations."""
    carry = any(boundary.carries)
    for index, (leaf, carries) in enumerate(zip(boundary.leaves, boundary.carries, strict=True)):
        if (
            isinstance(leaf, torch.Tensor)
            and (carries if carry else leaf.is_floating_point())
            and _is_dense(leaf)
        ):
            yield index


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, in whatever order."""
    if tensor.layout is not torch.strided:
        return False
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return filled > 0
