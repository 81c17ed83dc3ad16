"""How a layer's weights get from the host into a slot: straight from page-locked memory, or through
a ring.

[Note: staging] A ring needs somebody to fill it while the worker goes on queueing computations, so
each device that has one also has a helper thread. The worker hands it a shipment and goes on;
before it queues the first computation that reads the slot it waits until the last copy is *queued*,
and the compute lane then waits for that copy's event.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from ..device import Device, Event, Lane
from ..errors import InternalError
from ..memory.pinning import HostMemory
from ..memory.ring import Piece, PinnedRing
from ..params.working import LayerParameters, ParameterStore, ParameterUse, parts_of, view_of
from ..quantized import QuantizedWeight
from ..system.cores import limit_threads
from ..threads.worker import Worker
from .read_ahead import ReadAhead

_MOST_THREADS = 4


class Sent(Protocol):
    """A layer on its way into a slot. Used by the worker that sent it."""

    def arrive(self, lane: Lane) -> None:
        """Has ``lane``, which is current, wait until the slot is filled, and makes there what is to
        be made from what came. May block until the copies are queued, and raises what kept the slot
        from being filled."""
        ...

    def give_up(self) -> None:
        """Nobody will read the slot: afterwards no more copies into it are queued, and nothing
        reads the weights on the host but copies queued already."""
        ...


class Sender(Protocol):
    """Sends layers to one device."""

    helper: Worker | None

    def send(
        self,
        layer: LayerParameters,
        uses: Sequence[ParameterUse],
        slot: torch.Tensor,
        version: int = 0,
    ) -> Sent:
        """Starts writing ``uses``, all or some of the layer's at that version, to ``slot``; returns
        at once.

        The up lane waits for the slot already.

        The working copies must not be written until the slot is filled.
        """
        ...

    def close(self) -> None:
        """Frees what sending needed. Nothing may be under way."""
        ...


class Queued(NamedTuple):
    """All copies are queued."""

    ready: Event

    def arrive(self, lane: Lane) -> None:
        lane.wait(self.ready)

    def give_up(self) -> None:
        return


class Dequantized:
    """Some of what is sent are parts of quantized weights. The lane that computes with them makes
    the dense weights, because the up lane is there to keep the link busy."""

    def __init__(self, sent: Sent, slot: torch.Tensor, uses: Iterable[ParameterUse]) -> None:
        self._sent = sent
        self._slot = slot
        self._uses = [use for use in uses if use.is_quantized]

    def arrive(self, lane: Lane) -> None:
        self._sent.arrive(lane)
        for use in self._uses:
            assert isinstance(use.parameter, QuantizedWeight)
            use.parameter.format.dequantize_into(
                parts_of(self._slot, use), view_of(self._slot, use)
            )
        self._uses.clear()  # the next stage run that finds the layer there has nothing to make

    def give_up(self) -> None:
        self._sent.give_up()


class DirectSender:
    """Queues copies on the up lane itself: one for a layer that lies in one block, else some per
    parameter."""

    def __init__(
        self,
        device: Device,
        store: ParameterStore,
        memory: HostMemory,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self.helper: Worker | None = None
        self._lane = device.up
        self._device_name = device.name
        self._read_ahead = read_ahead
        self._store = store
        self._memory = memory

    def send(
        self,
        layer: LayerParameters,
        uses: Sequence[ParameterUse],
        slot: torch.Tensor,
        version: int = 0,
    ) -> Sent:
        if self._read_ahead is not None:
            self._read_ahead.check()
        second = self._store.second_of(layer, version)
        image = self._store.image_of(layer)
        others = uses
        if second is not None:
            there = [use for use in uses if use.place in second.tensors]
            others = [use for use in uses if use.place not in second.tensors]
            for start, stop in _runs(layer, there):
                source = second.image[start - second.offset : stop - second.offset]
                self._lane.copy_(slot[start : start + source.nbytes], source)
        if image is not None:
            for start, stop in _runs(layer, others):
                self._lane.copy_(slot[start:stop], image[start:stop])
        else:
            for use in others:
                for target, source in self._copies(slot, use, version):
                    self._lane.copy_(target, source)
        if self._read_ahead is not None:
            self._read_ahead.passed(self._device_name, layer)
        return Queued(self._lane.record())

    def _copies(
        self, slot: torch.Tensor, use: ParameterUse, version: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if use.is_quantized:
            for target, (_, source) in zip(parts_of(slot, use), use.sources, strict=True):
                yield from self._memory.copies(target, source)
        else:
            yield from self._memory.copies(view_of(slot, use), self._store.working(use, version))

    def close(self) -> None:
        return


class RingSender:
    """Has a helper thread pass unpinned weights through a ring. See [Note: staging]."""

    def __init__(
        self,
        device: Device,
        store: ParameterStore,
        memory: HostMemory,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._device_name = device.name
        self._read_ahead = read_ahead
        self._ring = PinnedRing(device.up, memory, max(layer.image_bytes for layer in store.layers))
        self._sender = Worker(f"roundpipe-sender-{device.name}")
        # Because copies need few threads, and those they take are taken from the optimizer.
        self._sender.submit(limit_threads(min(torch.get_num_threads(), _MOST_THREADS)))
        self.helper: Worker | None = self._sender

    def send(
        self,
        layer: LayerParameters,
        uses: Sequence[ParameterUse],
        slot: torch.Tensor,
        version: int = 0,
    ) -> Sent:
        shipment = _Shipment(self._ring, slot, uses)
        read_ahead = self._read_ahead
        if read_ahead is None:
            self._sender.submit(shipment.run)
        else:
            self._sender.submit(lambda: shipment.run(read_ahead.check))
            self._sender.submit(lambda: read_ahead.passed(self._device_name, layer))
        return shipment

    def close(self) -> None:
        self._ring.close()


class _Shipment:
    """``run`` is the helper's, the rest the worker's."""

    def __init__(self, ring: PinnedRing, slot: torch.Tensor, uses: Sequence[ParameterUse]) -> None:
        self._ring = ring
        self._slot = slot
        self._uses = uses
        self._is_wanted = True
        self._queued: Future[Event] = Future()

    def run(self, check: Callable[[], None] = lambda: None) -> None:
        """Never raises: what goes wrong is the worker's to tell."""
        try:
            check()
            pieces = [_piece(*source) for use in self._uses for source in use.sources]
            ready = self._ring.send(self._slot, pieces, lambda: self._is_wanted)
            if not self._is_wanted:
                raise InternalError("weights were asked for that had been given up on the way")
            self._queued.set_result(ready)
        except BaseException as error:
            self._queued.set_exception(error)

    def arrive(self, lane: Lane) -> None:
        # Every shipment before this one ends by itself, since all events that the helper waits for
        # are queued already.
        lane.wait(self._queued.result())

    def give_up(self) -> None:
        self._is_wanted = False
        wait([self._queued])


def make_sender(
    device: Device, store: ParameterStore, memory: HostMemory, read_ahead: ReadAhead | None = None
) -> Sender:
    """What suits how the working copies lie in host memory."""
    kind = RingSender if memory.needs_staging else DirectSender
    return kind(device, store, memory, read_ahead)


def _runs(layer: LayerParameters, uses: Sequence[ParameterUse]) -> Iterator[tuple[int, int]]:
    """From where to where ``uses`` lie in the layer's image: neighbours together."""
    bounds = sorted([*_offsets(layer.uses), layer.image_bytes])
    ends = dict(pairwise(bounds))
    start = stop = 0
    for offset in sorted(_offsets(uses)):
        if offset != stop:
            if stop > start:
                yield start, stop
            start = offset
        stop = ends[offset]
    if stop > start:
        yield start, stop


def _offsets(uses: Iterable[ParameterUse]) -> list[int]:
    return [offset for use in uses for offset in use.parts_at or (use.offset,)]


def _piece(offset: int, source: torch.Tensor) -> Piece:
    flat = source.contiguous().view(-1)
    return Piece(
        offset, flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    )
