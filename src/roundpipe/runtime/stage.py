"""A stage on a device: its weights in slots and its layers' replicas, for the time of one visit."""

import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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
from .replica import Modes, attributes_set, is_plain, pairs, replicate
from .residency import FROZEN, Residency, Stamp, WeightsVersion
from .staging import Queued, Sender, Sent, view_of
from .timing import Timer
from .transfer import Boundary, copied


class UploadedLayer(NamedTuple):
    """A layer's weights in a slot, usable after ``sent.event()``."""

    layer: LayerParameters
    slot: Slot
    sent: Sent


class BlockCompiler:
    """Compiles each repeated layer class once a device; all its layers, and all their replicas, share the result.

    The compiler counts what it has made of a code object, and stops after a few: variants for other devices, modes and
    shapes, of every engine in the process. Hence a code object for each engine and device.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        counts = Counter(type(layer) for layer in layers)
        self._kinds = {kind for kind, count in counts.items() if count > 1}
        self._compiled: dict[tuple[type, str], Callable[..., Any]] = {}

    def apply(self, replica: nn.Module, device: Device) -> None:
        """The replica's ``__call__``, hooks included, now runs the compiled forward. Called by the device's worker."""
        kind = type(replica)
        if kind not in self._kinds or "forward" in replica.__dict__:
            return
        key = kind, device.name
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_own_code(kind.forward))
        replica.__dict__["forward"] = types.MethodType(self._compiled[key], replica)

    def let_go(self, replica: nn.Module, device: Device) -> None:
        """Breaks the circle that `apply` has made, so that the replica goes as soon as nobody uses it."""
        bound = replica.__dict__.get("forward")
        if bound is not None and getattr(bound, "__func__", None) is self._compiled.get((type(replica), device.name)):
            del replica.__dict__["forward"]


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
        self.modules: dict[int, nn.Module] = {}
        # Of each of ``modules``, every module of the user's beside its replica, as it was made.
        self.pairs: dict[int, list[tuple[nn.Module, nn.Module]]] = {}
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
        address = _address(leaf)
        return address != 0 and any(_address(uploaded.slot.buffer) == address for uploaded in self.uploaded.values())

    def apart(self, layer: int, value: Any, output: Any) -> Any:
        """What a layer has returned for ``value``, without memory of its buffers, which it may write to for the next
        microbatch. Only looks where it has to: not at what a graph has made, nor at what went in."""
        given = set(map(id, pytree.tree_leaves(value)))
        leaves = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
        if all(leaf.grad_fn is not None or id(leaf) in given for leaf in leaves):
            return output
        parts = (part for _, part in self.pairs[layer])
        held = chain.from_iterable((*part._buffers.values(), *part.__dict__.values()) for part in parts)
        own = {_address(tensor) for tensor in held if isinstance(tensor, torch.Tensor)} - {0}
        return pytree.tree_map(lambda leaf: copied(leaf) if _address(leaf) in own else leaf, output) if own else output

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


def _address(leaf: Any) -> int:
    """Of the memory it lies in; 0 for what has none."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return 0
    return leaf.untyped_storage().data_ptr()


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
        if index not in stage.modules:
            self._open(stage, index)
        return stage.modules[index]

    def _open(self, stage: Stage, index: int) -> None:
        layer, slot, sent = stage.uploaded[index]
        self._device.compute.wait(sent.event())
        accumulator = Accumulator(layer, self._rules)
        residents: dict[int, nn.Parameter] = {}
        for use in layer.uses:
            trains = id(use.parameter) in stage.flags.trains
            # ``data``, because views would share one count of writes: writing to one would spoil the graphs of all.
            resident = nn.Parameter(view_of(slot.buffer, use).data, requires_grad=trains)
            if trains and stage.visit.pass_ is not Pass.FORWARD:
                accumulator.attach(use, resident)
            residents[id(use.parameter)] = resident
        replica = replicate(self._layers[index], residents, self.buffers.place, stage.flags)
        if self._compiler is not None:
            self._compiler.apply(replica, self._device)
        stage.modules[index] = replica
        stage.pairs[index] = pairs(self._layers[index], replica)
        stage.add_accumulator(accumulator)

    def watch(self, stage: Stage, index: int) -> LayerWatch:
        """Knows what the layer's modules are like, and can make them so again. To be used on the compute lane."""
        if index not in stage.watches:
            self.module(stage, index)
            stage.watches[index] = LayerWatch(
                stage.pairs[index], self._device, self.buffers, self._writers, stage.flags
            )
        return stage.watches[index]

    def buffer_updates(self, stage: Stage) -> list[BufferUpdate]:
        """The buffers that the visit's forwards changed."""
        updates = []
        ready = self._device.compute.record()
        for owner, replica in self._pairs(stage):
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
        for owner, replica in self._pairs(stage):
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

    def _pairs(self, stage: Stage) -> Iterator[tuple[nn.Module, nn.Module]]:
        return chain.from_iterable(stage.pairs.values())

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
        if self._compiler is not None:
            for replica in stage.modules.values():
                self._compiler.let_go(replica, self._device)
        for accumulator in stage.accumulators.values():
            accumulator.let_go()
        stage.modules.clear()
        stage.pairs.clear()
        stage.watches.clear()
        stage.accumulators.clear()
        stage.forget_landing()
        over = self._device.compute.record()
        # Layers that were done early first, in that order, because the pool hands out what came first.
        early = {index: departure.free for index, departure in stage.departures.items() if departure.free is not None}
        stage.departures.clear()
        for index in [*sorted(early, reverse=True), *(stage.uploaded.keys() - early.keys())]:
            uploaded = stage.uploaded[index]
            self.residency.release(uploaded.layer, uploaded.slot, early.get(index, over))
        stage.uploaded.clear()

    def drop_slots_of_others(self) -> None:
        """Gives back the memory of slots that none of these layers could use: engines of other parts of a model left
        them, and this engine's plan counts on all of the device."""
        self.slots.keep_only(layer.num_bytes for layer in self._store.layers)

    def close(self) -> None:
        """Frees what it holds on the device."""
        self.residency.clear()
        self.slots.clear()
        self.buffers.clear()
