"""Gradients on their way to the optimizer: summed on the device, and offloaded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import nn

from ..device import Device, Event
from ..kernels import triton_kernels
from .dtypes import GradientRules
from .gradient_buffers import GradientBuffer, GradientBuffers, is_small, num_norms, unpacked
from .working import LayerParameters, ParameterUse


class Accumulator:
    """Sums one layer's gradients over the microbatches of a stage run, on the device.

    During the stage run's last microbatch it offloads them by itself as soon as all are there, so
    that they go down while shallower layers are still in their backward. A gradient that comes
    after that (a layer may run backward inside its own backward) takes back what it has sent.
    """

    def __init__(self, layer: LayerParameters, rules: GradientRules) -> None:
        self.layer = layer
        self.sums: dict[int, torch.Tensor] = {}
        self.uses: list[ParameterUse] = []
        self.dtypes: dict[int, torch.dtype] = {}  # to offload in, by place
        # Offloading again writes to the same one: the lane keeps the order.
        self.buffer: GradientBuffer | None = None
        self._rules = rules
        self._missing: set[int] = set()
        self.offloader: Offloader | None = None  # once the stage run's last microbatch begins
        self._offloaded: OffloadedLayer | None = None

    def attach(self, residents: Mapping[int, nn.Parameter]) -> None:
        """There will be a backward. ``residents`` are by the ``id`` of the working parameter."""
        if not self.uses:
            for use in self.layer.uses:
                if residents[id(use.parameter)].requires_grad:
                    self._attach(use, residents[id(use.parameter)])

    def _attach(self, use: ParameterUse, resident: nn.Parameter) -> None:
        """Takes each gradient of ``resident`` as soon as autograd has finished it, in microbatch
        order."""
        sums, place = self.sums, use.place
        summed, self.dtypes[place] = self._rules.dtypes(use.parameter)
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
            if self.offloader is not None:
                self._came(place, self.offloader)

        resident.register_post_accumulate_grad_hook(take)

    def _came(self, place: int, offloader: "Offloader") -> None:
        """On whichever thread runs the layer's backward."""
        self._offloaded = None
        self._missing.discard(place)
        if not self._missing:
            offloader.came(self.layer)
            self._offloaded = offloader.send(self)

    def offload_into(self, offloaded: "list[OffloadedLayer]") -> None:
        """The stage run's backwards are queued: whatever came goes down, if it has not yet."""
        if self.sums:
            assert self.offloader is not None
            offloaded.append(self._offloaded or self.offloader.send(self))

    def let_go(self) -> None:
        """Everything has offloaded. Said because a layer's replica may be part of a circle, and
        holds this by a hook: what is in here would stay until the circle is found."""
        self.sums.clear()
        self._offloaded = self.buffer = self.offloader = None
        self._missing = set(self.dtypes)  # because the next stage run may go on with it


class OffloadedLayer(NamedTuple):
    """A layer's gradients on the host, or on the device if it has a device state there; complete
    once ``ready`` is reached.

    ``gradients`` maps a use's index to them, ``norms`` to what `norms_of` them is.
    ``first_microbatch`` tells apart what several stage runs of a layer, each for a share of the
    microbatches, have sent.
    """

    layer: LayerParameters
    buffer: GradientBuffer
    gradients: dict[int, torch.Tensor]
    norms: dict[int, torch.Tensor]
    ready: Event
    first_microbatch: int = 0


class Backward(Protocol):
    """Stands for a call, or a backward pass over several, that has made gradients."""

    @property
    def offloaded(self) -> Sequence[OffloadedLayer]: ...

    def wait_finished(self) -> None:
        """Blocks until all of it is on the host; raises what keeps it away."""


def norms_of(gradient: torch.Tensor) -> torch.Tensor:
    """2-norms whose own 2-norm is the gradient's: of a large one each row's, of a small one its
    own."""
    return row_norms(gradient) if num_norms(gradient.shape) > 1 else _norms_of_all([gradient])


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


def _sum(before: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In ``dtype``. ``before`` is a sum of that dtype, which is written to, or the first
    gradient."""
    kernel = triton_kernels("gradient_sums") if gradient.is_cuda else None
    if kernel is not None and kernel.can_add(before, gradient, dtype):
        total: torch.Tensor = kernel.add(before, gradient)
        return total
    total = before if before.dtype is dtype else before.to(dtype)
    return total.add_(gradient)


def _rounded(total: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """In ``dtype``, and the norms of its rows then."""
    kernel = triton_kernels("gradient_sums") if total.is_cuda else None
    if kernel is not None and kernel.can_round(total, dtype):
        both: tuple[torch.Tensor, torch.Tensor] = kernel.rounded(total, dtype)
        return both
    result = total.to(dtype)
    return result, row_norms(result)


class _Rounded(NamedTuple):
    """Gradients as they offload: ``gradients`` by place, and the norms of them in that order.
    ``whole``: all of them in one, as they lie in a block, if they are small."""

    gradients: dict[int, torch.Tensor]
    norms: torch.Tensor
    whole: torch.Tensor | None = None


def _all_rounded(
    sums: Mapping[int, torch.Tensor], dtypes: Mapping[int, torch.dtype]
) -> list[_Rounded]:
    alone, small = list[_Rounded](), dict[torch.dtype, dict[int, torch.Tensor]]()
    for place, total in sorted(sums.items()):
        if is_small(total.shape):
            small.setdefault(dtypes[place], {})[place] = total
        else:
            gradient, norms = _rounded(total, dtypes[place])
            alone.append(_Rounded({place: gradient}, norms))
    return alone + [_together(totals, dtype) for dtype, totals in small.items()]


def _together(sums: dict[int, torch.Tensor], dtype: torch.dtype) -> _Rounded:
    totals = list(sums.values())
    whole = torch.empty(sum(map(torch.Tensor.numel, totals)), dtype=dtype, device=totals[0].device)
    gradients = unpacked(whole, [total.shape for total in totals])
    # Not one behind the other first, which in fp32 takes twice that memory.
    torch._foreach_copy_(gradients, totals)
    return _Rounded(dict(zip(sums, gradients, strict=True)), _norms_of_all(gradients), whole)


class Offloader(NamedTuple):
    """Sends the gradients of one stage run down.

    ``copies`` is entered for the time of so many bytes' copies. A layer that ``stays`` is updated
    on the device, so only norms go down. ``came`` is told that all gradients of a layer are there,
    on whichever thread runs its backward.
    """

    device: Device
    buffers: GradientBuffers
    copies: Callable[[int], AbstractContextManager[None]]
    stays: Callable[[LayerParameters], bool]
    came: Callable[[LayerParameters], None]
    first_microbatch: int

    def send(self, accumulator: Accumulator) -> OffloadedLayer:
        """Sends a layer's sums, rounded, and with them the norms of what is sent, so that clipping
        need not read it.

        Called when the stage run's last backward of the layer is queued; returns at once. What is
        sent stays alive through ``borrow`` until the copies are done.
        """
        layer, lane = accumulator.layer, self.device.down
        if accumulator.buffer is None:
            stays = self.stays(layer)
            accumulator.buffer = self.buffers.take(layer, accumulator.uses, stays=stays)
        buffer = accumulator.buffer
        stays = not buffer.tensors  # as when it offloaded before, if this is to replace that
        with self.device.compute.work(), torch.no_grad():
            all_rounded = _all_rounded(accumulator.sums, accumulator.dtypes)
            all_norms = torch.cat([rounded.norms for rounded in all_rounded]).double()
        made: dict[int, torch.Tensor] = {}
        for rounded in all_rounded:
            made |= rounded.gradients
        lane.wait(self.device.compute.record())
        if not stays:
            with self.copies(sum(gradient.nbytes for gradient in made.values())):
                for rounded in all_rounded:
                    self._copy(rounded, buffer)
        sent_norms = buffer.norms[: len(all_norms)]
        lane.copy_(sent_norms, all_norms)
        lane.borrow(all_norms)
        counts = [num_norms(gradient.shape) for gradient in made.values()]
        norms = dict(zip(made, sent_norms.split(counts), strict=True))
        gradients = made if stays else {place: buffer.tensors[place] for place in made}
        return OffloadedLayer(layer, buffer, gradients, norms, lane.record(), self.first_microbatch)

    def _copy(self, rounded: _Rounded, buffer: GradientBuffer) -> None:
        """Small ones at once, if all that the buffer has room for are there."""
        block = buffer.blocks.get(tuple(rounded.gradients))
        pairs = [(buffer.tensors[place], each) for place, each in rounded.gradients.items()]
        if rounded.whole is not None and block is not None:
            pairs = [(block, rounded.whole)]
        for target, source in pairs:
            self.device.down.copy_(target, source)
            self.device.down.borrow(source)
