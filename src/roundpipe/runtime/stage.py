"""A stage on a device: its weights in slots and its layers' replicas, for the time of one visit."""

import types
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..device import Device, Lane
from ..errors import ConfigError
from ..memory.slots import Slot, SlotPool
from ..params.gradients import Accumulator, GradientRules, LandedLayer
from ..params.store import LayerParameters, ParameterStore, ParameterUse
from ..plan.actions import Pass, Visit
from .buffers import BufferCache, KnownBuffers
from .call import AttributeUpdate, BufferUpdate
from .departure import Departure
from .layer_state import LayerWatch, Writers
from .replica import Modes, Replica, attributes_set, hook_tables, is_plain
from .residency import FROZEN, Residency, Stamp, WeightsVersion
from .residents import Residents
from .staging import Queued, Sender, Sent
from .timing import Timer
from .transfer import Boundary, address_of, copied


class UploadedLayer(NamedTuple):
    """A layer's weights in a slot, or in its seat if ``is_seated``, usable after ``sent.event()``."""

    layer: LayerParameters
    slot: Slot
    sent: Sent
    is_seated: bool = False


class BlockCompiler:
    """Compiles each repeated layer class once a device; all its layers, and all their replicas, share the result.

    The compiler counts what it has made of a code object, and stops after a few: variants for other devices, modes and
    shapes, of every engine in the process. Hence a code object for each engine and device, and one for each choice of
    inner modules that have hooks, because it takes for granted that modules without any get none.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        counts = Counter(type(layer) for layer in layers)
        self._kinds = {kind for kind, count in counts.items() if count > 1}
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def apply(self, replica: nn.Module, device: Device, modes: Modes) -> None:
        """The replica's ``__call__``, hooks included, now runs the compiled forward. Called by the device's worker."""
        kind = type(replica)
        if kind not in self._kinds or "forward" in replica.__dict__:
            return
        key = kind, device.name, _hooked(replica) if modes.hooks else ()
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_own_code(kind.forward))
        replica.__dict__["forward"] = types.MethodType(self._compiled[key], replica)

    def let_go(self, replica: nn.Module) -> None:
        """Breaks the circle that `apply` has made, so that the replica goes as soon as nobody uses it."""
        bound = replica.__dict__.get("forward")
        if bound is not None and getattr(bound, "__func__", None) in self._compiled.values():
            del replica.__dict__["forward"]


def _hooked(module: nn.Module) -> tuple[int, ...]:
    """Which of the inner modules have hooks, and of what kind."""
    inner = enumerate(module.modules())
    return tuple(
        number for place, part in inner if place for number, table in enumerate(hook_tables(part), place << 4) if table
    )


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, types.FunctionType):
        return function
    code, parts = function.__code__.replace(), (function.__name__, function.__defaults__, function.__closure__)
    own = types.FunctionType(code, function.__globals__, *parts)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


class Stage:
    """One visit's stage. Filled by ``StageLoader``; used and released by the same worker.

    ``modes``: per layer, whether it trains and which of its parameters do; what a layer's behaviour may depend on.
    """

    def __init__(self, visit: Visit, flags: Modes, weights: WeightsVersion, timer: Timer) -> None:
        self.visit = visit
        self.timer = timer
        self.flags = flags
        self.weights = weights
        self.uploaded: dict[int, UploadedLayer] = {}
        self.modes: dict[int, tuple[bool, ...]] = {}
        self.replicas: dict[int, Replica] = {}
        self.residents: dict[int, Residents] = {}
        self.untouched: set[int] = set()  # layers whose forwards are over and have set nothing on their modules
        self.watches: dict[int, LayerWatch] = {}
        self.accumulators: dict[int, Accumulator] = {}
        self.departures: dict[int, Departure] = {}
        self._land: Callable[[Accumulator], LandedLayer] | None = None

    def give_up(self) -> None:
        """Nobody will compute with it: no copies into its slots are queued any more."""
        for uploaded in self.uploaded.values():
            uploaded.sent.give_up()

    def holds(self, leaf: Any) -> bool:
        """Whether it is memory of one of the stage's slots: a weight, or a view of one, that a layer has returned."""
        address = address_of(leaf)
        return address != 0 and any(address_of(uploaded.slot.buffer) == address for uploaded in self.uploaded.values())

    def apart(self, layer: int, value: Any, output: Any) -> Any:
        """What a layer has returned for ``value``, without memory of its buffers, which it may write to for the next
        microbatch. Only looks where it has to: not at what a graph has made, nor at what went in."""
        looked_at = output
        if type(output) is dict and type(value) is dict:  # taken apart are only what is not handed on as it is
            looked_at = [item for name, item in output.items() if item is not value.get(name)]
        leaves = [
            leaf for leaf in pytree.tree_leaves(looked_at) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None
        ]
        if not leaves or set(map(id, leaves)) <= set(map(id, pytree.tree_leaves(value))):
            return output
        parts = (part for _, part in self.replicas[layer].pairs)
        held = chain.from_iterable((*part._buffers.values(), *part.__dict__.values()) for part in parts)
        own = {address_of(tensor) for tensor in held if isinstance(tensor, torch.Tensor)} - {0}
        return (
            pytree.tree_map(lambda leaf: copied(leaf) if address_of(leaf) in own else leaf, output) if own else output
        )

    def let_go(self, boundary: Boundary) -> Boundary:
        """The boundary without memory of slots, which will hold other weights when somebody reads it."""
        return boundary._replace(leaves=tuple(copied(leaf) if self.holds(leaf) else leaf for leaf in boundary.leaves))

    def depart(self, layer: int, value: Any, compute: Lane) -> None:
        """The layer is about to run for its last backward; ``value`` goes into it."""
        self.departures[layer] = Departure(compute, pytree.tree_leaves(value), trains=any(self.modes[layer][1:]))

    def forget_landing(self) -> None:
        """Nobody lands anything any more; ``land`` mostly holds this stage."""
        self._land = None

    def land_when_complete(self, land: Callable[[Accumulator], LandedLayer]) -> None:
        """The last microbatch begins: layers send their gradients down as soon as they have all."""
        self._land = land
        for accumulator in self.accumulators.values():
            accumulator.land_when_complete(land)

    def add_accumulator(self, accumulator: Accumulator) -> None:
        self.accumulators[accumulator.layer.layer] = accumulator
        if self._land is not None:
            accumulator.land_when_complete(self._land)


class StageLoader:
    """Brings stages onto one device and takes them off again."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[nn.Module],
        store: ParameterStore,
        rules: GradientRules,
        compiler: BlockCompiler | None,
        known_buffers: KnownBuffers,
        writers: Writers,
        sender: Sender,
        slots: SlotPool,
    ) -> None:
        self._device = device
        self._sender = sender
        self._layers = layers
        self._store = store
        self._rules = rules
        self._compiler = compiler
        self._writers = writers
        self._told: set[tuple[type, str]] = set()
        self._compared: set[int] = set()  # frozen parameters, by id, that a forward has written at least once
        self.slots = slots
        self.residency = Residency(slots)
        self.buffers = BufferCache(device, known_buffers)
        # What the next visits go on with, by layer: see [Note: replicas used again].
        self._replicas: dict[int, Replica] = {}
        self._watches: dict[int, LayerWatch] = {}
        self._residents: dict[int, Residents] = {}

    def note_modes(self, stage: Stage) -> None:
        for index in stage.visit.layers:
            module, flags = self._layers[index], stage.flags
            trains = (id(use.parameter) in flags.trains for use in self._store.layers[index].uses)
            stage.modes[index] = (flags.training.get(id(module), module.training), *trains)

    def upload(self, stage: Stage, index: int) -> None:
        """Queues those of a layer's weights that are not on the device yet on the up lane; returns at once.

        The working copies must not be written until the lane has read them: publishing waits for the visit's results.
        """
        layer = self._store.layers[index]
        seat = self._store.seats.get(index)
        image = seat.image_at(stage.weights.version) if seat is not None else None
        if image is not None:
            here = self._device.compute.record()  # it was written on that lane
            stage.uploaded[index] = UploadedLayer(layer, Slot(image, here), Queued(here), is_seated=True)
            return
        stamps = [self._stamp(stage, use) for use in layer.uses]
        slot, missing, sent = self.residency.claim(layer, stamps)
        # Noted before anything can fail, so that ``release`` gives the slot back in any case.
        stage.uploaded[index] = UploadedLayer(layer, slot, sent or Queued(slot.free))
        if sent is None:
            self._device.up.wait(slot.free)
            num_bytes = sum(use.parameter.nbytes for use in missing)
            # What a helper sends is not on the lane yet when it would be marked.
            timed = (
                stage.timer.copies("up", self._device.up, num_bytes) if self._sender.helper is None else nullcontext()
            )
            with timed:
                sent = self._sender.send(layer, missing, slot.buffer, stage.weights.version)
            self.residency.filled(layer, slot, stamps, sent)
            stage.uploaded[index] = UploadedLayer(layer, slot, sent)

    def _stamp(self, stage: Stage, use: ParameterUse) -> Stamp:
        parameter, weights = use.parameter, stage.weights
        version = weights.version if id(parameter) in self._store.stepped else FROZEN
        return Stamp(parameter.data_ptr(), parameter._version, weights.num_loads, version)

    def module(self, stage: Stage, index: int) -> nn.Module:
        """The layer's replica, made when it is first asked for. To be called on the compute lane."""
        if index not in stage.replicas:
            self._open(stage, index)
        return stage.replicas[index].module

    def _open(self, stage: Stage, index: int) -> None:
        layer, slot, sent, _ = stage.uploaded[index]
        self._device.compute.wait(sent.event())
        _, *trains = stage.modes[index]
        residents = self._residents.pop(index, None)
        if residents is None or not residents.fit(slot.buffer, trains):
            residents = Residents(layer, slot.buffer, trains, self._rules)
        if stage.visit.pass_ is not Pass.FORWARD:
            residents.attach()
        stage.residents[index] = residents
        stage.replicas[index] = self._replica(stage, index, residents)
        stage.add_accumulator(residents.accumulator)

    def _replica(self, stage: Stage, index: int, residents: Residents) -> Replica:
        replica, watch = self._replicas.pop(index, None), self._watches.pop(index, None)
        if replica is not None and replica.fits(stage.flags):
            replica.fill(residents.parameters, self.buffers.place)
            if watch is not None:
                stage.watches[index] = watch
            return replica
        if replica is not None:
            self._drop(replica)
        compile_ = partial(self._compile, modes=stage.flags)
        return Replica(self._layers[index], residents.parameters, self.buffers.place, stage.flags, compile_)

    def _compile(self, module: nn.Module, modes: Modes) -> None:
        if self._compiler is not None:
            self._compiler.apply(module, self._device, modes)

    def _drop(self, replica: Replica) -> None:
        if self._compiler is not None:
            self._compiler.let_go(replica.module)

    def watch(self, stage: Stage, index: int) -> LayerWatch:
        """Knows what the layer's modules are like, and can make them so again. To be used on the compute lane."""
        self.module(stage, index)
        if index not in stage.watches:
            pairs = stage.replicas[index].pairs
            stage.watches[index] = LayerWatch(pairs, self._device, self.buffers, self._writers, stage.flags)
        return stage.watches[index]

    def buffer_updates(self, stage: Stage) -> list[BufferUpdate]:
        """The buffers that the visit's forwards changed, which are over."""
        updates = []
        ready = self._device.compute.record()
        stage.untouched.update(index for index, replica in stage.replicas.items() if replica.is_as_made)
        written = {index for index, residents in stage.residents.items() if residents.is_frozen_one_written}
        self._store.written.update(index for index, residents in stage.residents.items() if residents.is_one_written)
        for owner, replica in chain.from_iterable(
            replica.with_buffers if index in stage.untouched - written else replica.pairs
            for index, replica in stage.replicas.items()
        ):
            self._refuse_written_parameters(owner, replica)
            names = [name for name, value in replica._buffers.items() if self._is_replaced(owner, name, value)]
            for name, value in replica._buffers.items():
                # If a module wrote one buffer openly, it may have written the others silently.
                if name in names or self._is_written_silently(owner, name, value, look_again=bool(names)):
                    updates.append(BufferUpdate(owner, name, value, self._device, ready))
        return updates

    def _refuse_written_parameters(self, owner: nn.Module, replica: nn.Module) -> None:
        """Raises ConfigError for a frozen parameter whose value a forward has changed: it is in a slot, and lost there.

        Compared once, because adapters write to a parameter what it already is, in every forward.
        """
        for name, resident in replica._parameters.items():
            original = owner._parameters.get(name)
            is_written = resident is not None and resident._version > 0 and not resident.requires_grad
            is_known = id(original) in self._store.stepped or id(original) in self._compared
            if resident is None or original is None or not is_written or is_known:
                continue
            self._compared.add(id(original))
            if not torch.equal(resident.detach().cpu(), original.detach()):
                raise ConfigError(
                    f"{type(owner).__name__}.forward writes to its frozen parameter {name!r}, which would be lost: "
                    "weights on a device are copies. Register it with register_buffer"
                )

    def attribute_updates(self, stage: Stage) -> list[AttributeUpdate]:
        """The plain attributes that the visit's forwards set. Tensors live on the device and are left there."""
        updates = []
        touched = (replica.pairs for index, replica in stage.replicas.items() if index not in stage.untouched)
        for owner, replica in chain.from_iterable(touched):
            for name, value in attributes_set(owner, replica):
                if is_plain(value):
                    updates.append(AttributeUpdate(owner, name, value))
                elif isinstance(value, torch.Tensor) and name in owner.__dict__:
                    self._tell_if_lost(owner, name, value)
        return updates

    def _tell_if_lost(self, owner: nn.Module, name: str, value: torch.Tensor) -> None:
        key, theirs = (type(owner), name), owner.__dict__[name]
        is_theirs = isinstance(theirs, torch.Tensor) and self.buffers.is_placed(theirs, value)
        if key not in self._told and not is_theirs:
            self._told.add(key)
            warnings.warn(
                f"{type(owner).__name__}.forward sets the tensor attribute {name!r}, which the next call will not see: "
                "tensors stay on the device that made them. Register it with register_buffer if it is to be kept.",
                stacklevel=2,
            )

    def _is_replaced(self, owner: nn.Module, name: str, value: torch.Tensor | None) -> bool:
        return not self.buffers.is_placed(owner._buffers.get(name), value)

    def _is_written_silently(
        self, owner: nn.Module, name: str, value: torch.Tensor | None, *, look_again: bool
    ) -> bool:
        original = owner._buffers.get(name)
        if original is None or value is None:
            return False
        return self.buffers.is_written_silently(original, value, owner.training, look_again=look_again)

    def release(self, stage: Stage) -> None:
        """The slots may be overwritten once the compute lane is past this point, or past the layer's own last one."""
        for index, replica in stage.replicas.items():
            # A backward may set something too, by hooks on tensors or because it runs a part of the layer again.
            if (index in stage.untouched and stage.visit.pass_ is Pass.FORWARD) or replica.is_as_made:
                self._leave(stage, index, replica)
            else:
                self._drop(replica)
        for accumulator in stage.accumulators.values():
            accumulator.let_go()
        stage.replicas.clear()
        stage.watches.clear()
        stage.accumulators.clear()
        stage.forget_landing()
        over = self._device.compute.record()
        # Layers that were done early first, in that order, because the pool hands out what came first.
        early = {index: departure.free for index, departure in stage.departures.items() if departure.free is not None}
        stage.departures.clear()
        for index in [*sorted(early, reverse=True), *(stage.uploaded.keys() - early.keys())]:
            uploaded = stage.uploaded[index]
            if uploaded.is_seated:
                continue
            self.residency.release(uploaded.layer, uploaded.slot, early.get(index, over))
            residents = stage.residents.get(index)
            if residents is not None and self.residency.holds(index, uploaded.slot.buffer):
                self._residents[index] = residents
        stage.residents.clear()
        stage.uploaded.clear()

    def _leave(self, stage: Stage, index: int, replica: Replica) -> None:
        """To the next visit of the layer, unless another one that was under way has left its own already."""
        replica.empty()
        if index in self._replicas:
            self._drop(replica)
            return
        self._replicas[index] = replica
        if index in stage.watches and not replica.with_buffers:
            self._watches[index] = stage.watches[index]

    def forget(self) -> None:
        """After a failure nothing is taken for granted. No visit may be under way.

        Also buffers may have been written without a trace; that is only looked for at the end of a visit.
        """
        self.residency.clear()
        self.buffers.clear()
        self._residents.clear()
        self._watches.clear()
        for replica in self._replicas.values():
            self._drop(replica)
        self._replicas.clear()

    def want(self, layers: frozenset[int]) -> None:
        """A call begins after which ``layers`` are to stay. Those with a seat stay in any case."""
        self.residency.want(layers - self._store.seats.keys())
        self._residents = {
            index: residents for index, residents in self._residents.items() if residents.are_in(self.residency)
        }

    def is_seated(self, layer: LayerParameters) -> bool:
        """Whether the layer's optimizer state is on the device, so that its gradients need not leave it."""
        return layer.layer in self._store.seats

    def drop_slots_of_others(self) -> None:
        """Gives back the memory of slots that none of these layers could use: engines of other parts of a model left
        them, and this engine's plan counts on all of the device."""
        self.slots.keep_only(layer.num_bytes for layer in self._store.layers if layer.layer not in self._store.seats)

    def close(self) -> None:
        """Frees what it holds on the device."""
        self.forget()
        self.slots.clear()
