"""What a layer's forward saw of the buffers and attributes of its modules, so that a recompute sees the same.

By the time of the recompute the modules may be further on: by the microbatches after, by what the call has written to
the user's modules, by later calls, by the user.

[Note: looking before a forward]
[1] Of tensors that nobody writes the value is kept: one copy on the host for all microbatches, calls and devices.
[2] Of modules known to write to their tensors (batch norm, spectral norm, running averages) copies are kept.
[3] Whoever writes for the first time writes to its device's own copy. That was equal to the value kept by [1], from
    which every device, this one too, makes itself another copy when it recomputes.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..device import Device, Event
from .buffers import BufferCache, BufferValue
from .replica import STRUCTURE, Modes, attributes_of, is_plain
from .structure import Snapshot
from .transfer import bring, copied

_NOTHING = object()
KeptTensor = torch.Tensor | BufferValue  # by [2] or by [1]


class ModuleState(NamedTuple):
    """Plain attributes, buffers, and tensors set as plain attributes, by name."""

    attributes: dict[str, Any]
    buffers: dict[str, KeptTensor | None]
    tensors: dict[str, KeptTensor]

    def is_that_of(self, attributes: dict[str, Any], kept: Iterable[str]) -> bool:
        """Whether a module without tensors of its own has these ``attributes``, of which ``kept`` are what is kept."""
        return (
            not (self.buffers or self.tensors)
            and all(attributes.get(name, _NOTHING) is value for name, value in self.attributes.items())
            and all(name in self.attributes for name in kept)
        )

    def kept(self) -> Iterator[KeptTensor]:
        yield from (kept for kept in self.buffers.values() if kept is not None)
        yield from self.tensors.values()


class LayerState(NamedTuple):
    """The states of a layer's modules, in the order of ``pairs``; copies are ``source``'s, complete once ``ready``."""

    modules: tuple[ModuleState, ...]
    source: Device
    ready: Event


class Writers:
    """Which of the user's modules write to their tensors in a forward. Shared by all devices."""

    def __init__(self) -> None:
        self.known: set[int] = set()  # by id

    def add(self, module: nn.Module) -> None:
        self.known.add(id(module))


class _Held(NamedTuple):
    """The tensors of a module's replica but for its weights: buffers, and those set as plain attributes."""

    buffers: dict[str, torch.Tensor | None]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, replica: nn.Module) -> "_Held":
        tensors = {name: value for name, value in replica.__dict__.items() if _is_tensor(value)}
        return cls(replica._buffers.copy(), tensors)

    def is_still_of(self, replica: nn.Module) -> bool:
        """Whether the module still has these very tensors, written to or not."""
        return (
            replica._buffers.keys() == self.buffers.keys()
            and all(map(operator.is_, replica._buffers.values(), self.buffers.values()))
            and all(replica.__dict__.get(name) is tensor for name, tensor in self.tensors.items())
        )

    def has_only_names_of(self, owner: nn.Module) -> bool:
        return self.tensors.keys() <= owner.__dict__.keys() and self.buffers.keys() <= owner._buffers.keys()

    def all(self) -> Iterator[torch.Tensor]:
        yield from (tensor for tensor in self.buffers.values() if tensor is not None)
        yield from self.tensors.values()

    def beside(self, owner: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The user's own tensors, each with the device's."""
        for held, originals in ((self.buffers, owner._buffers), (self.tensors, owner.__dict__)):
            for name, tensor in held.items():
                original = originals.get(name)
                if tensor is not None and isinstance(original, torch.Tensor):
                    yield original, tensor


class LayerWatch:
    """Looks after one replica of a layer, for one visit. Used by the worker that made it, on the compute lane."""

    def __init__(
        self,
        replicas: Sequence[tuple[nn.Module, nn.Module]],
        device: Device,
        buffers: BufferCache,
        writers: Writers,
        modes: Modes,
    ) -> None:
        self._replicas = replicas
        self._device = device
        self._buffers = buffers
        self._writers = writers
        self._modes = modes
        self._ids = {id(owner) for owner, _ in replicas}
        self._state: LayerState | None = None  # the last one looked at or restored
        self._held: list[_Held] = []  # when it was looked at
        self._unclear: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # what of that has to be compared
        self._versions: dict[int, int] = {}
        self._remember()

    def _remember(self) -> None:
        """What the replicas look like now."""
        replicas = [replica for _, replica in self._replicas]
        buffers = (replica._buffers for replica in replicas)
        self._seen = Snapshot(map(attributes_of, replicas), buffers, sized=map(vars, replicas))

    def _is_as_left(self) -> bool:
        """Whether nobody has set anything or can have written to a tensor since ``_remember``."""
        return self._writers.known.isdisjoint(self._ids) and self._seen.is_true

    def look(self) -> LayerState:
        """The state now; the same as last time if nothing has changed, which is nearly always."""
        if self._state is not None and self._is_as_left():
            return self._state
        self._held = [_Held.of(replica) for _, replica in self._replicas]
        self._unclear = []
        for (owner, _), held in zip(self._replicas, self._held, strict=True):
            training = self._modes.training.get(id(owner), owner.training)
            facts = [(pair, self._buffers.known(pair[0])) for pair in held.beside(owner)]
            self._unclear.append([pair for pair, known in facts if known.is_unclear(training)])
            is_silent = training and any(known.is_written_silently for _, known in facts)
            if is_silent or not held.has_only_names_of(owner):
                self._writers.add(owner)  # because what a forward has made it may also write to
        written = self._written(held.all() for held in self._held)
        made: dict[int, KeptTensor] = {}  # by id, because modules of a layer may share a tensor

        def kept(tensor: torch.Tensor, original: Any) -> KeptTensor:
            if id(tensor) not in made:
                value = self._buffers.value_in(tensor, original) if isinstance(original, torch.Tensor) else None
                if value is None or id(tensor) in written:
                    made[id(tensor)] = _copy(tensor)
                else:
                    value.keep(original)
                    made[id(tensor)] = value
            return made[id(tensor)]

        modules = tuple(
            ModuleState(
                {
                    name: value
                    for name, value in replica.__dict__.items()
                    # The user's own lists too, for which he may put others: PEFT does when another adapter is set.
                    if name not in STRUCTURE and (is_plain(value) or value is owner.__dict__.get(name))
                },
                {name: b if b is None else kept(b, owner._buffers.get(name)) for name, b in held.buffers.items()},
                {name: kept(tensor, owner.__dict__.get(name)) for name, tensor in held.tensors.items()},
            )
            for (owner, replica), held in zip(self._replicas, self._held, strict=True)
        )
        self._state = LayerState(modules, self._device, self._device.compute.record())
        self._versions = {id(tensor): tensor._version for held in self._held for tensor in held.all()}
        self._remember()
        return self._state

    def _written(self, tensors: Iterable[Iterable[KeptTensor]]) -> set[int]:
        """By id, of each module's tensors those that it, or another one that shares them, is known to write."""
        known = self._writers.known
        return {
            id(tensor)
            for (owner, _), own in zip(self._replicas, tensors, strict=True)
            if id(owner) in known
            for tensor in own
        }

    def learn_writes(self) -> None:
        """After a forward that ``look`` came before: see [3]."""
        if not self._versions:
            return
        for (owner, replica), held, unclear in zip(self._replicas, self._held, self._unclear, strict=True):
            is_open = (held.buffers or held.tensors) and id(owner) not in self._writers.known
            if is_open and self._has_written(replica, held, unclear):
                self._writers.add(owner)

    def _has_written(
        self, replica: nn.Module, held: _Held, unclear: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> bool:
        return (
            not held.is_still_of(replica)
            or any(tensor._version != self._versions[id(tensor)] for tensor in held.all())
            or any(self._buffers.has_changed(original, tensor) for original, tensor in unclear)
        )

    def restore(self, state: LayerState) -> None:
        """The modules are as ``state`` has them, whatever a forward has done to them since."""
        if state is self._state and self._is_as_left():
            return
        written = self._written(module.kept() for module in state.modules)
        made: dict[int, torch.Tensor] = {}

        def local(kept: KeptTensor) -> torch.Tensor:
            if id(kept) not in made:
                if isinstance(kept, torch.Tensor):
                    (own,) = bring([kept], state.source, state.ready, self._device)
                    made[id(kept)] = _copy(own)
                else:
                    own = self._buffers.restore(kept)
                    made[id(kept)] = _copy(own) if id(kept) in written else own
            return made[id(kept)]

        for (_, replica), module in zip(self._replicas, state.modules, strict=True):
            attributes = replica.__dict__
            own = [name for name, value in attributes.items() if name not in STRUCTURE and _is_kept(value)]
            if not replica._buffers and module.is_that_of(attributes, own):
                continue  # because a module that nothing was set on can be used again
            for name in own:
                del attributes[name]
            attributes.update(module.attributes)
            attributes.update({name: local(kept) for name, kept in module.tensors.items()})
            attributes["_buffers"] = {
                name: kept if kept is None else local(kept) for name, kept in module.buffers.items()
            }
        self._state = state
        self._remember()


def _is_kept(value: Any) -> bool:
    return is_plain(value) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    """But for weights, of which a replica's are those of its visit."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        copy: torch.Tensor = copied(tensor) if tensor.layout is torch.strided else tensor.clone()
    return copy
