"""A stage run's weights: they come up into slots and go when it is over. What computes with them is
not its business."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..device import Device
from ..memory.slot_sizes import slot_bytes
from ..memory.slots import Slot, SlotPool
from ..params.working import LayerParameters, ParameterStore
from ..plan.actions import StageRun
from ..plan.memory import slot_counts
from ..transfer.read_ahead import ReadAhead
from ..transfer.residency import FROZEN, Residency, Stamp
from ..transfer.sender import Dequantized, Queued, Sender
from .call import Call, ModelThen
from .stage import Stage, UploadedLayer
from .timing import Timer


class StageLoader:
    """Brings stages onto one device and takes them off again. Used by the device's worker."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[nn.Module],
        store: ParameterStore,
        sender: Sender,
        slots: SlotPool,
        read_ahead: ReadAhead | None,
    ) -> None:
        self._device = device
        self._read_ahead = read_ahead
        self._layers = layers
        self._store = store
        self._sender = sender
        self.slots = slots
        self.residency = Residency(slots)

    def begin_call(
        self,
        stage_runs: Sequence[range],
        parked: Sequence[range],
        wanted: frozenset[int],
        room: float,
    ) -> None:
        """``wanted`` are the layers that are to stay after these stage runs; those with a device
        state stay in any case. The ``parked`` ones of the stage runs find theirs.

        Where slots take more than ``room``, those that neither the stage runs nor wanted layers
        will use are given back: earlier plans, and engines of other parts of the model, have left
        them.
        """
        wanted -= self._store.device_states.keys()
        self.residency.want(wanted)
        if self._read_ahead is not None:
            to_come = [layers for layers in stage_runs if layers not in parked]
            self._read_ahead.begin(self._device.name, [*self._to_send(to_come, wanted)])
        if self.slots.num_bytes <= room:
            return
        # At least 1, because a layer without weights has a slot too.
        sizes = [max(layer.num_bytes, 1) for layer in self._store.layers]
        passing = (
            0 if index in wanted or index in self._store.device_states else size
            for index, size in enumerate(sizes)
        )
        most = Counter(slot_counts(stage_runs, tuple(passing), num_devices=1))
        most.update(slot_bytes(sizes[index]) for index in self.residency.missing())
        self.slots.keep_only(most)

    def _to_send(
        self, stage_runs: Sequence[range], wanted: frozenset[int]
    ) -> Iterator[LayerParameters]:
        """The layers that will go up in these stage runs, in their order."""
        here = (wanted - self.residency.missing()) | self._store.device_states.keys()
        for index in chain(*stage_runs):
            if index not in here:
                yield self._store.layers[index]
            if index in wanted:
                here |= {index}

    def begin(self, stage_run: StageRun, model: ModelThen, timer: Timer, **how: Any) -> Stage:
        """A stage that has nothing yet. ``how``: what else a `Stage` takes."""
        modes, layer_modes = model.modes, {}
        for index in stage_run.layers:
            module = self._layers[index]
            trains = (id(use.parameter) in modes.trains for use in self._store.layers[index].uses)
            layer_modes[index] = (modes.training.get(id(module), module.training), *trains)
        return Stage(stage_run, model, layer_modes, timer, **how)

    def upload(self, stage: Stage, index: int) -> None:
        """Queues those of a layer's weights that are not on the device yet on the up lane; returns
        at once.

        The working copies must not be written until the lane has read them: writing back waits for
        the stage run's results.
        """
        layer = self._store.layers[index]
        image = self._store.whereabouts[index].image_at(stage.weights.version)
        if image is not None:
            here = self._device.compute.record()  # it was written on that lane
            stage.uploaded[index] = UploadedLayer(
                layer, Slot(image, here), Queued(here), is_on_device=True
            )
            return
        stamps = self._stamps(stage, layer)
        slot, missing, sent = self.residency.claim(layer, stamps)
        # Noted before anything can fail, so that ``release`` gives the slot back in any case.
        stage.uploaded[index] = UploadedLayer(layer, slot, sent or Queued(slot.free))
        if sent is None:
            self._device.up.wait(slot.free)
            num_bytes = sum(use.image_bytes for use in missing)
            # What a helper sends is not on the lane yet when it would be marked.
            timed = (
                stage.timer.copies("up", self._device.up, num_bytes)
                if self._sender.helper is None
                else nullcontext()
            )
            with timed:
                sent = self._sender.send(layer, missing, slot.buffer, stage.weights.version)
            if layer.has_quantized:
                sent = Dequantized(sent, slot.buffer, missing)
            self.residency.filled(layer, slot, stamps, sent)
            stage.uploaded[index] = UploadedLayer(layer, slot, sent)

    def _stamps(self, stage: Stage, layer: LayerParameters) -> list[Stamp]:
        stepped, (version, num_loads) = self._store.stepped, stage.weights
        times_replaced = self._store.writes.times_replaced
        return [
            Stamp(
                p.data_ptr(),
                times_replaced(p),
                p._version,
                num_loads,
                version if id(p) in stepped else FROZEN,
            )
            for p in (use.parameter for use in layer.uses)
        ]

    def park(self, stage: Stage) -> None:
        """Its forward is over, and its graphs go on to read its weights. ``release`` it after its
        backward."""
        stage.is_parked = True
        for uploaded in stage.uploaded.values():
            if not uploaded.is_on_device:
                self.residency.lend(uploaded.slot.buffer)

    def release(self, stage: Stage) -> None:
        """The slots may be overwritten once the compute lane is past this point, or past the
        layer's own last one."""
        over = self._device.compute.record()
        # Layers that were done early first, in that order, because the pool hands out what came
        # first.
        early = {
            index: departure.free
            for index, departure in stage.departures.items()
            if departure.free is not None
        }
        stage.departures.clear()
        for index in [*sorted(early, reverse=True), *(stage.uploaded.keys() - early.keys())]:
            uploaded = stage.uploaded[index]
            if not uploaded.is_on_device:
                if stage.is_parked:
                    self.residency.returned(uploaded.slot.buffer)
                self.residency.release(uploaded.layer, uploaded.slot, early.get(index, over))
        stage.uploaded.clear()

    def keeps(self, layer: int, slot: torch.Tensor) -> bool:
        """Whether the layer's weights stay there, in a slot or in an image of its device state."""
        if self.residency.holds(layer, slot):
            return True
        device_state = self._store.device_states.get(layer)
        return device_state is not None and device_state.owns(slot)

    def is_on_device(self, layer: LayerParameters) -> bool:
        """Whether the layer's optimizer state is on the device, so that its gradients need not
        leave it."""
        return layer.layer in self._store.device_states

    def offloading(self, layers: range) -> Iterator[LayerParameters]:
        """Those of ``layers`` whose gradients leave the device, in the order in which a backward
        makes them."""
        found = (self._store.layers[index] for index in reversed(layers))
        return (layer for layer in found if not self.is_on_device(layer))

    def forget(self) -> None:
        """Nothing is known of what slots hold any more. No stage run may be under way."""
        self.residency.clear()
        if self._read_ahead is not None:
            self._read_ahead.drop(self._device.name)

    def close(self) -> None:
        """Frees what it holds on the device."""
        self.forget()
        self.slots.clear()


class Uploads:
    """Layers on their way up to one device, in the schedule's order, each as soon as the optimizer
    has written it back.

    The worker does not stand still for a layer that it does not need yet: an update writes back
    shallow layers first, and a forward that follows it closely hides behind it. Used by the
    device's worker only.

    Args:
        is_written_back: of a layer and the version of the weights that a call runs with; raises
            what keeps that from ever being so.
    """

    def __init__(self, loader: StageLoader, is_written_back: Callable[[int, int], bool]) -> None:
        self._loader = loader
        self._is_written_back = is_written_back
        self._waiting: deque[tuple[Stage, int]] = deque()

    def begin(self, call: Call, stage: Stage) -> None:
        """Queues what is written back of the stage's weights; the rest follows when somebody needs
        some of it."""
        self._waiting.extend((stage, layer) for layer in stage.stage_run.layers)
        self._go_on(call)

    def need(self, call: Call, stage: Stage, layer: int) -> None:
        """Blocks until the layer's copies are queued. Raises Cancelled if the call fails
        meanwhile."""
        if not self._waiting:
            return
        while layer not in stage.uploaded:
            call.wait_until(lambda: self._is_next_written_back(call))
            self._upload_next()
        self._go_on(call)

    def give_up(self) -> None:
        self._waiting.clear()

    def _go_on(self, call: Call) -> None:
        while self._waiting and call.is_so(lambda: self._is_next_written_back(call)):
            self._upload_next()

    def _is_next_written_back(self, call: Call) -> bool:
        return self._is_written_back(self._waiting[0][1], call.model.weights.version)

    def _upload_next(self) -> None:
        self._loader.upload(*self._waiting[0])
        self._waiting.popleft()
