"""Host memory that gradients are offloaded to, which goes round from step to step."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate

import torch

from ..memory.pinning import HostMemory
from ..memory.slot_sizes import ALIGNMENT
from .dtypes import GradientRules
from .working import LayerParameters, ParameterUse

Layout = tuple[tuple[int, torch.Size, torch.dtype], ...]
# Elements. Smaller gradients go down together, because queueing a copy of each takes longer than
# copying: adapters, norms and biases.
_LEAST_ALONE = 1 << 20


class GradientBuffer:
    """Host memory for gradients of one layer: one tensor for each use in ``layout``, and
    ``num_norms`` of their norms.

    ``blocks`` are by places: small gradients of one dtype lie one behind the other in one. ``home``
    is the list of free buffers that it goes back to.
    """

    def __init__(
        self, layout: Layout, num_norms: int, memory: HostMemory, home: "list[GradientBuffer]"
    ) -> None:
        self.layout = layout
        self.num_norms = num_norms
        self.home = home
        together: dict[object, list[tuple[int, torch.Size, torch.dtype]]] = {}
        for place, shape, dtype in layout:
            key = dtype if is_small(shape) else place
            together.setdefault(key, []).append((place, shape, dtype))
        sizes = [sum(s.numel() * d.itemsize for _, s, d in uses) for uses in together.values()]
        *offsets, end = accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0)
        arena = memory.buffer(end + num_norms * torch.float64.itemsize)
        self.norms = arena.tensor(end, (num_norms,), torch.float64)
        self.tensors: dict[int, torch.Tensor] = {}
        self.blocks: dict[tuple[int, ...], torch.Tensor] = {}
        for offset, size, uses in zip(offsets, sizes, together.values(), strict=True):
            places, shapes, (dtype, *_) = zip(*uses, strict=True)
            block = arena.tensor(offset, (size // dtype.itemsize,), dtype)
            self.blocks[places] = block
            self.tensors |= zip(places, unpacked(block, shapes), strict=True)


class GradientBuffers:
    """Reuses gradient memory from step to step, because fresh host memory costs a page fault per 4
    KiB.

    ``submit`` has a thread do something that may take a second, with nobody waiting for it. Without
    one, memory is made when it is taken.
    """

    def __init__(
        self,
        memory: HostMemory,
        rules: GradientRules,
        submit: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._memory = memory
        self._rules = rules
        self._submit = submit
        # Because workers take buffers and the optimizer thread gives them back.
        self._lock = threading.Lock()
        # By layer, and whether they are for sums over calls.
        self._free: dict[tuple[int, bool], list[GradientBuffer]] = {}
        self._coming: dict[tuple[int, bool], Future[GradientBuffer]] = {}

    def expect(self, layers: Iterable[LayerParameters]) -> None:
        """A stage run begins whose gradients go down at its end, in this order of ``layers``. Those
        that have never had a buffer get their first one in a thread, because a backward would wait
        for page-locked memory: 0.7 of the 4 seconds of a first step."""
        if self._submit is None:
            return
        for layer in layers:
            key = layer.layer, False
            if key in self._free:
                continue
            uses, future = layer.trainable, Future[GradientBuffer]()
            with self._lock:
                if key in self._free:
                    continue
                free = self._free[key] = []
                if uses:
                    self._coming[key] = future
            if uses:
                layout, num_norms = self._layout(uses), _num_norms_of(uses)
                make = partial(GradientBuffer, layout, num_norms, self._memory, free)
                self._submit(partial(_make_buffer, future, make))

    def take(
        self, layer: LayerParameters, uses: Sequence[ParameterUse], *, stays: bool = False
    ) -> GradientBuffer:
        """For gradients as they offload, and their norms; for these alone if the layer ``stays`` on
        its device."""
        layout = () if stays else self._layout(uses)
        return self._take((layer.layer, False), layout, _num_norms_of(uses))

    def take_sums(self, layer: LayerParameters, uses: Sequence[ParameterUse]) -> GradientBuffer:
        """For sums over calls that are too wide for the memory that gradients offload in."""
        dtypes = [(use, self._rules.dtypes(use.parameter)) for use in uses]
        wide = [
            (use.place, use.parameter.shape, to.summed)
            for use, to in dtypes
            if to.summed != to.offloaded
        ]
        return self._take((layer.layer, True), tuple(wide), 0)

    def _layout(self, uses: Sequence[ParameterUse]) -> Layout:
        return tuple(
            (use.place, use.parameter.shape, self._rules.dtypes(use.parameter).offloaded)
            for use in uses
        )

    def _take(self, key: tuple[int, bool], layout: Layout, num_norms: int) -> GradientBuffer:
        with self._lock:
            free = self._free.setdefault(key, [])
            coming = self._coming.pop(key, None)
            while free:
                buffer = free.pop()
                if buffer.layout == layout and buffer.num_norms == num_norms:
                    return buffer
        # One that is not begun yet is made here, because its turn may be far.
        if coming is not None and not coming.cancel():
            buffer = coming.result()
            if buffer.layout == layout and buffer.num_norms == num_norms:
                return buffer
        return GradientBuffer(layout, num_norms, self._memory, free)

    def give_back(self, buffer: GradientBuffer) -> None:
        with self._lock:
            buffer.home.append(buffer)

    def clear(self) -> None:
        with self._lock:
            self._free.clear()
            for coming in self._coming.values():
                coming.cancel()
            self._coming.clear()


def _make_buffer(future: "Future[GradientBuffer]", make: Callable[[], GradientBuffer]) -> None:
    """Unless somebody could not wait. What goes wrong is for whoever takes the buffer."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)


def is_small(shape: torch.Size) -> bool:
    """Says whether gradients of that shape go down together with others, in a copy of their own."""
    return shape.numel() < _LEAST_ALONE


def unpacked(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _num_norms_of(uses: Iterable[ParameterUse]) -> int:
    return sum(num_norms(use.parameter.shape) for use in uses)


def num_norms(shape: torch.Size) -> int:
    """Counts the norms that are taken of a gradient."""
    return 1 if is_small(shape) or len(shape) < 2 else shape[0]
