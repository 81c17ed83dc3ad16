"""Gradients on their way to the optimizer: summed on the device, offloaded on the host."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from ..device import Device, Event, Lane
from .gradient_memory import (
    GradientBuffer,
    GradientBuffers,
    GradientRules,
    is_small,
    num_norms,
    unpacked,
)
from .working import LayerParameters, ParameterUse


class Accumulator:
    """Sums one layer's gradients over the microbatches of a stage run, on the device.

    During the stage run's last microbatch it offloads them by itself as soon as all are there, so
    that they go down while shallower layers are still in their backward. ``offloaded`` is what it
    has sent; a gradient that comes after that (a layer may run backward inside its own backward)
    takes it back.
    """

    def __init__(self, layer: LayerParameters, rules: GradientRules) -> None:
        self.layer = layer
        self.sums: dict[int, torch.Tensor] = {}
        self.offloaded: OffloadedLayer | None = None
        self._rules = rules
        self.uses: list[ParameterUse] = []
        self._offloaded_dtypes: dict[int, torch.dtype] = {}
        self._missing: set[int] = set()
        self.buffer: GradientBuffer | None = (
            None  # offloading again writes to the same one: the lane keeps the order
        )
        self._offload: Callable[[Accumulator], OffloadedLayer] | None = None

    def offload_when_complete(self, offload: Callable[["Accumulator"], "OffloadedLayer"]) -> None:
        """The stage run's last microbatch begins. ``offload`` is called on whichever thread runs
        its backward."""
        self._offload = offload

    def attach(self, use: ParameterUse, resident: nn.Parameter) -> None:
        """Takes each gradient of ``resident`` as soon as autograd has finished it, in microbatch
        order."""
        sums, place = self.sums, use.place
        summed, self._offloaded_dtypes[place] = self._rules.dtypes(use.parameter)
        self.uses.append(use)
        self._missing.add(place)

        def take(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            parameter.grad = None
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            # The first is kept as it is, because with one microbatch there is nothing to sum.
            before = sums.get(place)
            sums[place] = gradient if before is None else _sum(before, gradient, summed)
            if self._offload is not None:
                self._came(place, self._offload)

        resident.register_post_accumulate_grad_hook(take)

    def offloaded_dtype(self, place: int) -> torch.dtype:
        return self._offloaded_dtypes[place]

    def let_go(self) -> None:
        """Everything has offloaded. Said because a layer's replica may be part of a circle, and
        holds this by a hook: what is in here would stay until the circle is found."""
        self.sums.clear()
        self.offloaded = self.buffer = self._offload = None
        self._missing = {
            use.place for use in self.uses
        }  # because the next stage run may go on with it

    def _came(self, place: int, offload: Callable[["Accumulator"], "OffloadedLayer"]) -> None:
        self.offloaded = None
        self._missing.discard(place)
        if not self._missing:
            self.offloaded = offload(self)


class OffloadedLayer(NamedTuple):
    """A layer's gradients on the host, or on the device if it has a device state there; complete
    once ``ready`` is reached.

    ``gradients`` maps a use's index to them, ``norms`` to what `norms_of` them is.
    ``first_microbatch`` tells apart what several stage runs of a layer, each for a share of the
    microbatches, have sent.
    """

    layer: LayerParameters
    buffer: "GradientBuffer"
    gradients: dict[int, torch.Tensor]
    norms: dict[int, torch.Tensor]
    ready: Event
    first_microbatch: int = 0


def norms_of(gradient: torch.Tensor) -> torch.Tensor:
    """2-norms whose own 2-norm is the gradient's: of a large one each row's, of a small one its
    own."""
    if num_norms(gradient.shape) > 1:
        return row_norms(gradient)
    return _norms_of_all([gradient])


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each row, in fp32 or wider: short sums, which stay precise for any size of the
    whole."""
    dtype = torch.float32 if gradient.itemsize < 4 else None
    inner = tuple(range(1, gradient.ndim)) or None
    norms: torch.Tensor = torch.linalg.vector_norm(gradient, dim=inner, dtype=dtype)
    return norms.reshape(-1)


def _norms_of_all(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of each. They have one dtype."""
    return torch.stack(
        torch._foreach_norm(gradients, 2, torch.promote_types(gradients[0].dtype, torch.float64))
    )


@functools.cache
def _kernel() -> ModuleType | None:
    """None where there is no Triton, which torch brings along for GPUs on Linux."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("..kernels.gradient_sums", __package__)


def _sum(before: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In ``dtype``. ``before`` is a sum of that dtype, which is written to, or the first
    gradient."""
    kernel = _kernel() if gradient.is_cuda else None
    if kernel is not None and kernel.can_add(before, gradient, dtype):
        total: torch.Tensor = kernel.add(before, gradient)
        return total
    total = before if before.dtype is dtype else before.to(dtype)
    return total.add_(gradient)


def _rounded(total: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """In ``dtype``, and the norms of its rows then."""
    kernel = _kernel() if total.is_cuda else None
    if kernel is not None and kernel.can_round(total, dtype):
        both: tuple[torch.Tensor, torch.Tensor] = kernel.rounded(total, dtype)
        return both
    result = total.to(dtype)
    return result, row_norms(result)


class _Rounded(NamedTuple):
    """Gradients as they offload: ``gradients`` by place, and the norms of them in that order.
    ``whole``: all of them in one, as they lie in a pack, if they are small."""

    gradients: dict[int, torch.Tensor]
    norms: torch.Tensor
    whole: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients.values())


def _all_rounded(accumulator: Accumulator) -> list[_Rounded]:
    sums, alone = accumulator.sums, list[_Rounded]()
    small: dict[torch.dtype, list[int]] = {}
    for place in sorted(sums):
        dtype = accumulator.offloaded_dtype(place)
        if is_small(sums[place].shape):
            small.setdefault(dtype, []).append(place)
        else:
            gradient, norms = _rounded(sums[place], dtype)
            alone.append(_Rounded({place: gradient}, norms))
    return [
        *alone,
        *(
            _together({place: sums[place] for place in places}, dtype)
            for dtype, places in small.items()
        ),
    ]


def _together(sums: dict[int, torch.Tensor], dtype: torch.dtype) -> _Rounded:
    totals = list(sums.values())
    whole = torch.empty(sum(map(torch.Tensor.numel, totals)), dtype=dtype, device=totals[0].device)
    gradients = unpacked(whole, [total.shape for total in totals])
    # Not one behind the other first, which in fp32 takes twice that memory.
    torch._foreach_copy_(gradients, totals)
    return _Rounded(dict(zip(sums, gradients, strict=True)), _norms_of_all(gradients), whole)


def _send(rounded: _Rounded, buffer: GradientBuffer, lane: Lane) -> None:
    """Small ones at once, if all that the buffer has room for are there."""
    if rounded.whole is not None:
        pack = buffer.packs[rounded.whole.dtype]
        if pack.places == tuple(rounded.gradients):
            lane.copy_(pack.tensor, rounded.whole)
            lane.borrow(rounded.whole)
            return
    for place, gradient in rounded.gradients.items():
        lane.copy_(buffer.tensors[place], gradient)
        lane.borrow(gradient)


def offload(
    accumulator: Accumulator,
    buffers: GradientBuffers,
    device: Device,
    copies: Callable[[int], AbstractContextManager[None]],
    *,
    stays: bool = False,
) -> OffloadedLayer:
    """Sends a layer's sums down, rounded, and with them the norms of what is sent, so that clipping
    need not read it.

    Called by the device's worker after it queued the last backward of the stage run; returns at
    once. What is sent stays alive through ``borrow`` until the copies are done. ``copies`` is
    entered for the time of so many bytes' copies. With ``stays`` only norms go down: the layer is
    updated on the device.
    """
    if accumulator.buffer is None:
        take = buffers.take_norms if stays else buffers.take
        accumulator.buffer = take(accumulator.layer, accumulator.uses)
    buffer = accumulator.buffer
    stays = not buffer.tensors  # as when it offloaded before, if this is to replace that
    with device.compute.work(), torch.no_grad():
        all_rounded = _all_rounded(accumulator)
        all_norms = torch.cat([rounded.norms for rounded in all_rounded]).double()
    device.down.wait(device.compute.record())
    with nullcontext() if stays else copies(sum(rounded.nbytes for rounded in all_rounded)):
        for rounded in () if stays else all_rounded:
            _send(rounded, buffer, device.down)
    device.down.copy_(buffer.norms[: len(all_norms)], all_norms)
    device.down.borrow(all_norms)
    made = {
        place: gradient for rounded in all_rounded for place, gradient in rounded.gradients.items()
    }
    counts = [num_norms(gradient.shape) for gradient in made.values()]
    norms = dict(zip(made, buffer.norms[: len(all_norms)].split(counts), strict=True))
    gradients = made if stays else {place: buffer.tensors[place] for place in made}
    return OffloadedLayer(accumulator.layer, buffer, gradients, norms, device.down.record())
