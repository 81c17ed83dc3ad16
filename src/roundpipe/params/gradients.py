"""Gradients on their way to the optimizer: summed on the device, landed on the host."""

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from ..device import Device, Event
from ..memory.pinning import HostMemory
from ..slot_sizes import ALIGNMENT
from .store import LayerParameters, ParameterUse


class GradientDtypes(NamedTuple):
    """``summed``: what microbatches add up in; ``landed``: what crosses to the host, rounded once."""

    summed: torch.dtype
    landed: torch.dtype


class GradientRules:
    """Decides the dtypes of gradients.

    Sums are in fp32 whenever masters are (or wider, if the weights are); they land in ``grad_dtype`` or the working
    dtype.
    """

    def __init__(self, optim_dtype: torch.dtype | None, grad_dtype: torch.dtype | None) -> None:
        self._optim_dtype = optim_dtype
        self._grad_dtype = grad_dtype

    def master(self, parameter: nn.Parameter) -> torch.dtype:
        return self._optim_dtype or parameter.dtype

    def dtypes(self, parameter: nn.Parameter) -> GradientDtypes:
        summed = torch.promote_types(parameter.dtype, self.master(parameter))
        return GradientDtypes(summed, self._grad_dtype or parameter.dtype)


class Accumulator:
    """Sums one layer's gradients over the microbatches of a visit, on the device.

    During the visit's last microbatch it lands them by itself as soon as all are there, so that they go down while
    shallower layers are still in their backward. ``landed`` is what it has sent; a gradient that comes after that
    (a layer may run backward inside its own backward) takes it back.
    """

    def __init__(self, layer: LayerParameters, rules: GradientRules) -> None:
        self.layer = layer
        self.sums: dict[int, torch.Tensor] = {}
        self.landed: LandedLayer | None = None
        self._rules = rules
        self.uses: list[ParameterUse] = []
        self._landed_dtypes: dict[int, torch.dtype] = {}
        self._missing: set[int] = set()
        self.buffer: GradientBuffer | None = None  # landing again writes to the same one: the lane keeps the order
        self._land: Callable[[Accumulator], LandedLayer] | None = None

    def land_when_complete(self, land: Callable[["Accumulator"], "LandedLayer"]) -> None:
        """The visit's last microbatch begins. ``land`` is called on whichever thread runs its backward."""
        self._land = land

    def attach(self, use: ParameterUse, resident: nn.Parameter) -> None:
        """Takes each gradient of ``resident`` as soon as autograd has finished it, in microbatch order."""
        sums, place = self.sums, use.place
        summed, self._landed_dtypes[place] = self._rules.dtypes(use.parameter)
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
            if self._land is not None:
                self._came(place, self._land)

        resident.register_post_accumulate_grad_hook(take)

    def landed_dtype(self, place: int) -> torch.dtype:
        return self._landed_dtypes[place]

    def let_go(self) -> None:
        """Everything has landed. Said because a layer's replica may be part of a circle, and holds this by a hook: what
        is in here would stay until the circle is found."""
        self.sums.clear()
        self.landed = self.buffer = self._land = None
        self._missing = {use.place for use in self.uses}  # because the next visit may go on with it

    def _came(self, place: int, land: Callable[["Accumulator"], "LandedLayer"]) -> None:
        self.landed = None
        self._missing.discard(place)
        if not self._missing:
            self.landed = land(self)


class LandedLayer(NamedTuple):
    """A layer's gradients on the host, or on the device if it has a seat there; complete once ``ready`` is reached.

    ``gradients`` maps a use's index to them, ``norms`` to the 2-norms of their rows. ``first_microbatch`` tells apart
    what several visits of a layer, each for a share of the microbatches, have sent.
    """

    layer: LayerParameters
    buffer: "GradientBuffer"
    gradients: dict[int, torch.Tensor]
    norms: dict[int, torch.Tensor]
    ready: Event
    first_microbatch: int = 0


Layout = tuple[tuple[int, torch.Size, torch.dtype], ...]


class GradientBuffer:
    """Host memory for gradients of one layer: one tensor for each use in ``layout``, and ``num_rows`` norms of rows.

    ``home`` is the list of free buffers that it goes back to.
    """

    def __init__(self, layout: Layout, num_rows: int, memory: HostMemory, home: "list[GradientBuffer]") -> None:
        self.layout = layout
        self.num_rows = num_rows
        self.home = home
        offsets, num_bytes = [], 0
        for _, shape, dtype in layout:
            offsets.append(num_bytes)
            num_bytes += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        arena = memory.arena(num_bytes + num_rows * torch.float64.itemsize)
        self.tensors = {
            place: arena.tensor(offset, shape, dtype)
            for offset, (place, shape, dtype) in zip(offsets, layout, strict=True)
        }
        self.norms = arena.tensor(num_bytes, (num_rows,), torch.float64)


class GradientBuffers:
    """Reuses gradient memory from step to step, because fresh host memory costs a page fault per 4 KiB."""

    def __init__(self, memory: HostMemory, rules: GradientRules) -> None:
        self._memory = memory
        self._rules = rules
        self._lock = threading.Lock()  # because workers take buffers and the optimizer thread gives them back
        self._landed: dict[int, list[GradientBuffer]] = {}
        self._summed: dict[int, list[GradientBuffer]] = {}

    def take(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        """For gradients as they land."""
        dtypes = [(use, self._rules.dtypes(use.parameter).landed) for use in uses]
        return self._take(self._landed, layer, dtypes, _num_rows(use for use, _ in dtypes))

    def take_norms(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        """For the norms alone of gradients that stay on their device."""
        return self._take(self._landed, layer, [], _num_rows(uses))

    def take_sums(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        """For sums over calls that are too wide for the memory that gradients land in."""
        dtypes = [(use, self._rules.dtypes(use.parameter)) for use in uses]
        return self._take(self._summed, layer, [(use, to.summed) for use, to in dtypes if to.summed != to.landed], 0)

    def _take(
        self,
        homes: dict[int, list[GradientBuffer]],
        layer: LayerParameters,
        dtypes: Iterable[tuple[ParameterUse, torch.dtype]],
        num_rows: int,
    ) -> GradientBuffer:
        layout = tuple((use.place, use.parameter.shape, dtype) for use, dtype in dtypes)
        with self._lock:
            free = homes.setdefault(layer.layer, [])
            while free:
                buffer = free.pop()
                if buffer.layout == layout and buffer.num_rows == num_rows:
                    return buffer
        return GradientBuffer(layout, num_rows, self._memory, free)

    def give_back(self, buffer: GradientBuffer) -> None:
        with self._lock:
            buffer.home.append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._landed.clear()
            self._summed.clear()


def _num_rows(uses: Iterable[ParameterUse]) -> int:
    return sum(num_norms(use.parameter.shape) for use in uses)


def num_norms(shape: torch.Size) -> int:
    """How many rows a gradient is taken norms of."""
    return shape[0] if len(shape) > 1 else 1


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each row, in fp32 or wider: short sums, which stay precise for any size of the whole."""
    dtype = torch.float32 if gradient.itemsize < 4 else None
    inner = tuple(range(1, gradient.ndim)) or None
    norms: torch.Tensor = torch.linalg.vector_norm(gradient, dim=inner, dtype=dtype)
    return norms.reshape(-1)


@functools.cache
def _kernel() -> ModuleType | None:
    """None where there is no Triton, which torch brings along for GPUs on Linux."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(".sum_kernel", __package__)


def _sum(before: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In ``dtype``. ``before`` is a sum of that dtype, which is written to, or the first gradient."""
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


def land(
    accumulator: Accumulator,
    buffers: GradientBuffers,
    device: Device,
    copies: Callable[[int], AbstractContextManager[None]],
    *,
    stays: bool = False,
) -> LandedLayer:
    """Sends a layer's sums down, rounded, and with them the norms of what is sent, so that clipping need not read it.

    Called by the device's worker after it queued the last backward of the visit; returns at once. What is sent stays
    alive through ``borrow`` until the copies are done. ``copies`` is entered for the time of so many bytes' copies.
    With ``stays`` only norms go down: the layer is updated on the device.
    """
    if accumulator.buffer is None:
        take = buffers.take_norms if stays else buffers.take
        accumulator.buffer = take(accumulator.layer, accumulator.uses)
    buffer = accumulator.buffer
    stays = not buffer.tensors  # as when it landed before, if this is to replace that
    with device.compute.work(), torch.no_grad():
        both = {place: _rounded(total, accumulator.landed_dtype(place)) for place, total in accumulator.sums.items()}
        landed = {place: gradient for place, (gradient, _) in both.items()}
        all_norms = torch.cat([norms for _, norms in both.values()]).double()
    device.down.wait(device.compute.record())
    gradients, norms, first = {}, {}, 0
    with nullcontext() if stays else copies(sum(gradient.nbytes for gradient in landed.values())):
        for place, gradient in landed.items():
            if stays:
                gradients[place] = gradient
            else:
                gradients[place] = buffer.tensors[place]
                device.down.copy_(gradients[place], gradient)
                device.down.borrow(gradient)
            norms[place] = buffer.norms[first : first + num_norms(gradient.shape)]
            first += norms[place].numel()
    device.down.copy_(buffer.norms[:first], all_norms)
    device.down.borrow(all_norms)
    return LandedLayer(accumulator.layer, buffer, gradients, norms, device.down.record())
