"""Values that cross from one stage run to another: where they are, when they are ready, and how
they reach a device or the caller."""

from collections.abc import Container, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..device import Device, Event
from ..errors import InternalError


class Boundary(NamedTuple):
    """What goes into a layer for one microbatch: a pytree, taken apart.

    ``carries`` says, leaf by leaf, whether a gradient flows back through it. ``source`` is the
    device whose compute lane made the tensors (None: the caller), complete once ``ready`` is
    reached.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    carries: tuple[bool, ...]
    source: Device | None
    ready: Event | None

    @property
    def value(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.spec)


class BoundaryGradient(NamedTuple):
    """Gradients for a boundary's leaves, None where none flowed."""

    leaves: tuple[torch.Tensor | None, ...]
    source: Device | None
    ready: Event | None


def of_all_leaves(
    given: Iterable[torch.Tensor | None], carries: Iterable[bool]
) -> BoundaryGradient:
    """The caller's gradients, ``given`` for the leaves that carry one."""
    remaining = iter(given)
    leaves = tuple(next(remaining) if carried else None for carried in carries)
    return BoundaryGradient(leaves, None, None)


def boundary_of(
    value: Any, source: Device | None, ready: Event | None, carries: Sequence[bool] | None = None
) -> Boundary:
    leaves, spec = pytree.tree_flatten(value)
    return Boundary(
        tuple(leaves), spec, tuple(carries) if carries else (False,) * len(leaves), source, ready
    )


def num_bytes(leaves: Iterable[Any]) -> int:
    """Of the tensors among them. What sparse ones hold is not counted."""
    return sum(leaf.nbytes for leaf in leaves if _has_storage(leaf))


def bytes_with_caller(boundaries: Iterable[Boundary]) -> int:
    """Of those of the caller's tensors that are on a device already, or whose gradients will be."""
    return num_bytes(
        leaf
        for b in boundaries
        for leaf, carried in zip(b.leaves, b.carries, strict=True)
        if isinstance(leaf, torch.Tensor) and (carried or leaf.device.type != "cpu")
    )


def address_of(leaf: Any) -> int:
    """Of the memory that a tensor lies in; 0 for what has none."""
    return leaf.untyped_storage().data_ptr() if _has_storage(leaf) else 0


def _has_storage(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def bring(
    leaves: Sequence[Any], source: Device | None, ready: Event | None, device: Device
) -> tuple[Any, ...]:
    """The leaves as ``device``'s compute lane may use them; tensors come detached.

    Called by the receiving device's worker, never blocks. A copy between devices runs on the
    sender's down lane and the receiver's up lane, so that neither compute lane waits for the link.
    """
    arrived, copied = [], False
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            arrived.append(leaf)
        elif device.holds(leaf):
            arrived.append(leaf.detach())
        else:
            arrived.append(_copy(leaf.detach(), source, ready, device))
            copied = True
    if copied:
        device.compute.wait(device.up.record())
    if ready is not None and source is not device:
        device.compute.wait(ready)
    return tuple(arrived)


def _copy(
    tensor: torch.Tensor, source: Device | None, ready: Event | None, device: Device
) -> torch.Tensor:
    with ExitStack() as lanes:
        if source is not None and ready is not None:
            lanes.enter_context(source.down.work())
            source.down.wait(ready)
            device.up.wait(ready)
        lanes.enter_context(device.up.work())
        moved = tensor.to(device.torch_device, non_blocking=True)
    if source is not None:
        source.down.borrow(tensor)
    device.compute.borrow(moved)
    return moved


def bring_value(value: Any, device: Device) -> Any:
    """A pytree of the caller's (a label) as ``device``'s compute lane may use it, also after the
    call has returned."""
    leaves, spec = pytree.tree_flatten(value)
    return pytree.tree_unflatten([copied(leaf) for leaf in bring(leaves, None, None, device)], spec)


def delivered(
    boundary: Boundary, target: torch.device | None, shared: Container[int] | None
) -> Boundary:
    """A call's output on the caller's device (None: wherever it is), complete. Blocks until the
    device has made it.

    ``shared``: addresses of memory that a backward may still read, for a layer may return what was
    kept as its input; None: of any. Of that the caller, who may write to it, gets a copy.
    """
    if boundary.source is None or boundary.ready is None:
        raise InternalError("an output without a source device")
    boundary.ready.wait()
    leaves = []
    for leaf in boundary.leaves:
        if isinstance(leaf, torch.Tensor):
            boundary.source.lend_to_caller(leaf)
            # What goes to the host is no memory of the device any more, also of a device that is
            # made of the CPU.
            goes_down = target is not None and target.type == "cpu"
            is_shared = shared is None or address_of(leaf) in shared
            leaf = leaf.to(leaf.device if target is None else target, copy=goes_down or is_shared)
        leaves.append(leaf)
    return boundary._replace(leaves=tuple(leaves))


class _Copy(torch.autograd.Function):
    """A copy with the strides of the original, because CPU kernels round differently on what
    ``clone`` packs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        if 0 in tensor.stride():  # an expanded tensor: several elements share memory
            return tensor.clone()
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def copied(leaf: Any) -> Any:
    """A leaf whose memory nobody else has; differentiable where grad is on."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # Sparse and nested ones have no strides.
    return (
        _Copy.apply(leaf) if leaf.layout is torch.strided and not leaf.is_nested else leaf.clone()
    )
