"""Gradients on their way to the optimizer: summed on the device, landed on the host, added up per step."""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from ..device import Device, Event
from ..memory.pinning import HostArena, HostMemory
from .store import LayerParameters, ParameterStore, ParameterUse


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
        self._missing: set[int] = set()
        self.buffer: GradientBuffer | None = None  # landing again writes to the same one: the lane keeps the order
        self._land: Callable[[Accumulator], LandedLayer] | None = None

    def land_when_complete(self, land: Callable[["Accumulator"], "LandedLayer"]) -> None:
        """The visit's last microbatch begins. ``land`` is called on whichever thread runs its backward."""
        self._land = land

    def attach(self, use: ParameterUse, resident: nn.Parameter) -> None:
        """Takes each gradient of ``resident`` as soon as autograd has finished it, in microbatch order."""
        summed = self._rules.dtypes(use.parameter).summed
        self.uses.append(use)
        self._missing.add(use.place)

        def take(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            if gradient is None:
                return
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            if use.place in self.sums:
                self.sums[use.place].add_(gradient)
            else:
                self.sums[use.place] = gradient.to(summed)
            self._came(use.place)

        resident.register_post_accumulate_grad_hook(take)

    def _came(self, place: int) -> None:
        if self._land is None:
            return
        self.landed = None
        self._missing.discard(place)
        if not self._missing:
            self.landed = self._land(self)


class LandedLayer(NamedTuple):
    """A layer's gradients on the host, complete once ``ready`` is reached. ``gradients`` maps a use's index to them."""

    layer: LayerParameters
    buffer: "GradientBuffer"
    gradients: dict[int, torch.Tensor]
    ready: Event


class GradientBuffer:
    """Host memory for the landed gradients of one layer, one tensor per trainable use."""

    def __init__(self, layout: tuple[tuple[int, torch.Size, torch.dtype, int], ...], arena: HostArena) -> None:
        self.layout = layout
        self._arena = arena
        self.tensors = {index: arena.tensor(offset, shape, dtype) for index, shape, dtype, offset in layout}


class GradientBuffers:
    """Reuses gradient memory from step to step, because fresh host memory costs a page fault per 4 KiB."""

    def __init__(self, memory: HostMemory, rules: GradientRules) -> None:
        self._memory = memory
        self._rules = rules
        self._lock = threading.Lock()  # because workers take buffers and the optimizer thread gives them back
        self._free: dict[int, list[GradientBuffer]] = {}

    def take(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        layout, num_bytes = [], 0
        for use in uses:
            dtype = self._rules.dtypes(use.parameter).landed
            layout.append((use.place, use.parameter.shape, dtype, num_bytes))
            num_bytes += -(-use.parameter.numel() * dtype.itemsize // 64) * 64
        with self._lock:
            free = self._free.setdefault(layer.layer, [])
            while free:
                buffer = free.pop()
                if buffer.layout == tuple(layout):
                    return buffer
        return GradientBuffer(tuple(layout), self._memory.arena(num_bytes))

    def give_back(self, layer: LayerParameters, buffer: GradientBuffer) -> None:
        with self._lock:
            self._free.setdefault(layer.layer, []).append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


def land(accumulator: Accumulator, buffers: GradientBuffers, device: Device) -> LandedLayer:
    """Sends a layer's sums down.

    Called by the device's worker after it queued the last backward of the visit; returns at once. The sums stay alive
    through ``borrow`` until the copies are done.
    """
    if accumulator.buffer is None:
        accumulator.buffer = buffers.take(accumulator.layer, accumulator.uses)
    buffer = accumulator.buffer
    device.down.wait(device.compute.record())
    gradients = {}
    for index, summed in accumulator.sums.items():
        target = buffer.tensors[index]
        device.down.copy_(target, summed)
        device.down.borrow(summed)
        gradients[index] = target
    return LandedLayer(accumulator.layer, buffer, gradients, device.down.record())


class GradientWindow:
    """The gradients between two optimizer steps: one sum per use over the calls committed so far.

    Touched by the optimizer thread only; the first call's buffers are adopted, so one call per step copies nothing.
    """

    def __init__(self, store: ParameterStore, rules: GradientRules, buffers: GradientBuffers) -> None:
        self._store = store
        self._rules = rules
        self._buffers = buffers
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        self._held: dict[int, tuple[LayerParameters, GradientBuffer]] = {}
        self.error: BaseException | None = None

    def commit(self, landed: Iterable[LandedLayer]) -> None:
        """Adds one call's gradients. Sums over calls are fp32 (or wider)."""
        for layer, buffer, gradients, _ in landed:
            adopted = False
            for place, gradient in gradients.items():
                key = (layer.layer, place)
                if key not in self._sums:
                    adopted = layer.layer not in self._held
                    self._sums[key] = gradient if adopted else gradient.clone()
                    continue
                total = self._sums[key]
                summed = self._rules.dtypes(layer.uses[place].parameter).summed
                self._sums[key] = (total if total.dtype == summed else total.to(summed)).add_(gradient)
            if adopted:
                self._held[layer.layer] = (layer, buffer)
            else:
                self._buffers.give_back(layer, buffer)

    def parts(self, parameter: nn.Parameter) -> tuple[torch.Tensor, ...]:
        """What reached the parameter: one tensor for each use, in layer order, to be added in the dtype of sums.

        They are the window's own memory: not to be written, valid until ``release``.
        """
        keys = [(use.layer, use.place) for use in self._store.uses[id(parameter)]]
        return tuple(self._sums[key] for key in keys if key in self._sums)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum of ``parts``; None if nothing reached the parameter."""
        parts = self.parts(parameter)
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total.to(self._rules.dtypes(parameter).summed) + part
        return total

    def release(self) -> None:
        """Forgets all sums and gives the memory back for the next call."""
        self._sums.clear()
        for layer, buffer in self._held.values():
            self._buffers.give_back(layer, buffer)
        self._held.clear()
