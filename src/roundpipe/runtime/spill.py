"""Kept inputs that a device has no room for: to the host behind the forward, and back ahead of their recompute.

[Note: spilling] The schedule says which layers' inputs are spilled and when each is fetched. A copy down runs beside
the computes that follow; a copy up is issued one microbatch ahead, on whichever device has the backward visit. Only
what is a layer's own is moved: masks and the like, which pass through all layers, are one tensor in every kept input.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..device import Device, Event
from ..memory.blocks import HostBlock, HostBlocks
from .transfer import Boundary, bring


class Spilled(NamedTuple):
    """On the host once ``ready`` is reached. ``rest`` has None where ``blocks`` has a tensor, with a model of it."""

    rest: Boundary
    blocks: dict[int, tuple[HostBlock, torch.Tensor]]
    ready: Event


class Fetched(NamedTuple):
    """On a device again once ``ready`` is reached. ``rest`` has None where ``leaves`` has a tensor."""

    rest: Boundary
    leaves: dict[int, torch.Tensor]
    ready: Event


KeptInput = Boundary | Spilled | Fetched


def spill(boundary: Boundary, device: Device, blocks: HostBlocks) -> KeptInput:
    """Sends what the device's compute lane has just made down; the device's memory is free when the copies are done."""
    chosen = list(_own(boundary))
    if not chosen or boundary.ready is None:
        return boundary
    leaves, waiting = list(boundary.leaves), {}
    device.down.wait(boundary.ready)
    for index in chosen:
        leaf, leaves[index] = leaves[index], None
        block = blocks.take(leaf.nbytes)
        if block.free is not None:
            device.down.wait(block.free)
        waiting[index] = block, block.like(leaf)
        device.down.copy_(waiting[index][1], leaf)
        device.down.borrow(leaf)
        block.free = device.down.record()
    return Spilled(boundary._replace(leaves=tuple(leaves)), waiting, device.down.record())


def fetch(kept: KeptInput, device: Device) -> KeptInput:
    """Starts bringing a spilled input to ``device``."""
    if not isinstance(kept, Spilled):
        return kept
    leaves = {}
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


def restored(kept: KeptInput, device: Device) -> Boundary:
    """The input as the device's compute lane may use it."""
    kept = fetch(kept, device)
    assert not isinstance(kept, Spilled)
    rest = kept.rest if isinstance(kept, Fetched) else kept
    leaves = list(bring(rest.leaves, rest.source, rest.ready, device))
    if isinstance(kept, Fetched):
        device.compute.wait(kept.ready)
        for index, leaf in kept.leaves.items():
            leaves[index] = leaf
    return rest._replace(leaves=tuple(leaves))


def _own(boundary: Boundary) -> Iterator[int]:
    """The leaves that a gradient flows back through; if none does, those that could be activations."""
    carry = any(boundary.carries)
    for index, (leaf, carries) in enumerate(zip(boundary.leaves, boundary.carries, strict=True)):
        if isinstance(leaf, torch.Tensor) and (carries if carry else leaf.is_floating_point()) and _is_dense(leaf):
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
