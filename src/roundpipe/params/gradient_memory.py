"""Dtypes of gradients, and host memory for them, which goes round from step to step."""

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from ..memory.pinning import HostMemory
from ..memory.slot_sizes import ALIGNMENT
from .working import LayerParameters, ParameterUse


class GradientDtypes(NamedTuple):
    """``summed``: what microbatches add up in; ``offloaded``: what crosses to the host, rounded
    once."""

    summed: torch.dtype
    offloaded: torch.dtype


class GradientRules:
    """Decides the dtypes of gradients.

    Sums are in fp32 whenever masters are (or wider, if the weights are); they offload in
    ``grad_dtype`` or the working dtype.
    """

    def __init__(self, optim_dtype: torch.dtype | None, grad_dtype: torch.dtype | None) -> None:
        self._optim_dtype = optim_dtype
        self._grad_dtype = grad_dtype

    def master(self, parameter: nn.Parameter) -> torch.dtype:
        return _of_kind(self._optim_dtype, parameter)

    def dtypes(self, parameter: nn.Parameter) -> GradientDtypes:
        summed = torch.promote_types(parameter.dtype, self.master(parameter))
        return GradientDtypes(summed, _of_kind(self._grad_dtype, parameter))


def _of_kind(dtype: torch.dtype | None, parameter: nn.Parameter) -> torch.dtype:
    """``dtype``, or the complex one that is made of it: a real one would drop half of a complex
    weight."""
    if dtype is None:
        return parameter.dtype
    return torch.promote_types(dtype, torch.complex64) if parameter.is_complex() else dtype


Layout = tuple[tuple[int, torch.Size, torch.dtype], ...]
# Elements. Smaller gradients go down together, because queueing a copy of each takes longer than
# copying: adapters, norms and biases.
_LEAST_ALONE = 1 << 20


class Pack(NamedTuple):
    """Host memory for the small gradients of one dtype, which lie there one behind the other."""

    places: tuple[int, ...]
    tensor: torch.Tensor


class GradientBuffer:
    """Host memory for gradients of one layer: one tensor for each use in ``layout``, and
    ``num_norms`` of their norms.

    ``home`` is the list of free buffers that it goes back to.
    """

    def __init__(
        self, layout: Layout, num_norms: int, memory: HostMemory, home: "list[GradientBuffer]"
    ) -> None:
        self.layout = layout
        self.num_norms = num_norms
        self.home = home
        small: dict[torch.dtype, list[tuple[int, torch.Size]]] = {}
        alone = []
        for place, shape, dtype in layout:
            if is_small(shape):
                small.setdefault(dtype, []).append((place, shape))
            else:
                alone.append((place, shape, dtype))
        counts = [
            (sum(shape.numel() for _, shape in pieces), dtype) for dtype, pieces in small.items()
        ]
        sizes = [shape.numel() * dtype.itemsize for _, shape, dtype in alone]
        *offsets, end = _aligned([*sizes, *(count * dtype.itemsize for count, dtype in counts)])
        arena = memory.arena(end + num_norms * torch.float64.itemsize)
        self.norms = arena.tensor(end, (num_norms,), torch.float64)
        self.tensors = {
            place: arena.tensor(offset, shape, dtype)
            for offset, (place, shape, dtype) in zip(offsets[: len(alone)], alone, strict=True)
        }
        self.packs: dict[torch.dtype, Pack] = {}
        for offset, (count, dtype) in zip(offsets[len(alone) :], counts, strict=True):
            places, shapes = zip(*small[dtype], strict=True)
            self.packs[dtype] = Pack(places, arena.tensor(offset, (count,), dtype))
            self.tensors |= zip(places, unpacked(self.packs[dtype].tensor, shapes), strict=True)


class GradientBuffers:
    """Reuses gradient memory from step to step, because fresh host memory costs a page fault per 4
    KiB."""

    def __init__(self, memory: HostMemory, rules: GradientRules) -> None:
        self._memory = memory
        self._rules = rules
        # Because workers take buffers and the optimizer thread gives them back.
        self._lock = threading.Lock()
        self._offloaded: dict[int, list[GradientBuffer]] = {}
        self._summed: dict[int, list[GradientBuffer]] = {}

    def take(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        """For gradients as they offload."""
        dtypes = [(use, self._rules.dtypes(use.parameter).offloaded) for use in uses]
        return self._take(self._offloaded, layer, dtypes, _count_norms(use for use, _ in dtypes))

    def take_norms(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        """For the norms alone of gradients that stay on their device."""
        return self._take(self._offloaded, layer, [], _count_norms(uses))

    def take_sums(self, layer: LayerParameters, uses: Iterable[ParameterUse]) -> GradientBuffer:
        """For sums over calls that are too wide for the memory that gradients offload in."""
        dtypes = [(use, self._rules.dtypes(use.parameter)) for use in uses]
        return self._take(
            self._summed,
            layer,
            [(use, to.summed) for use, to in dtypes if to.summed != to.offloaded],
            0,
        )

    def _take(
        self,
        homes: dict[int, list[GradientBuffer]],
        layer: LayerParameters,
        dtypes: Iterable[tuple[ParameterUse, torch.dtype]],
        num_norms: int,
    ) -> GradientBuffer:
        layout = tuple((use.place, use.parameter.shape, dtype) for use, dtype in dtypes)
        with self._lock:
            free = homes.setdefault(layer.layer, [])
            while free:
                buffer = free.pop()
                if buffer.layout == layout and buffer.num_norms == num_norms:
                    return buffer
        return GradientBuffer(layout, num_norms, self._memory, free)

    def give_back(self, buffer: GradientBuffer) -> None:
        with self._lock:
            buffer.home.append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._offloaded.clear()
            self._summed.clear()


def _count_norms(uses: Iterable[ParameterUse]) -> int:
    return sum(num_norms(use.parameter.shape) for use in uses)


def is_small(shape: torch.Size) -> bool:
    return shape.numel() < _LEAST_ALONE


def _aligned(sizes: Iterable[int]) -> list[int]:
    """Where pieces of so many bytes begin, and where the last one ends."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))


def unpacked(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def num_norms(shape: torch.Size) -> int:
    """How many norms are taken of a gradient."""
    return 1 if is_small(shape) or len(shape) < 2 else shape[0]
