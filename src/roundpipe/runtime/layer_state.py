"""What a layer's forward saw of the buffers and attributes of its modules, so that a recompute sees the same.

By the time of the recompute the modules may be further on: by the microbatches after, by what the call has written to
the user's modules, by later calls, by the user.

[Note: looking before a forward]
[1] Tensors that nobody writes are kept as they are: the device's copy is the same for all microbatches and calls.
[2] Of modules known to write to their tensors (batch norm, spectral norm, running averages) copies are kept.
[3] Whoever writes for the first time has written to a tensor kept by [1]. Up to then it was equal to the user's own, so
    everybody who keeps it gets that value back, and only the module goes on with what it has written.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ..device import Device, Event
from .buffers import BufferCache, SilentWrites
from .replica import STRUCTURE, Modes, is_plain
from .transfer import copied


class ModuleState(NamedTuple):
    """Plain attributes, buffers, and tensors set as plain attributes, by name."""

    attributes: dict[str, Any]
    buffers: dict[str, torch.Tensor | None]
    tensors: dict[str, torch.Tensor]

    def is_held_by(self, replica: nn.Module) -> bool:
        """Whether the module still has these very tensors, written to or not."""
        return (
            replica._buffers.keys() == self.buffers.keys()
            and all(map(operator.is_, replica._buffers.values(), self.buffers.values()))
            and all(replica.__dict__.get(name) is tensor for name, tensor in self.tensors.items())
        )

    def all_tensors(self) -> Iterator[torch.Tensor]:
        yield from (tensor for tensor in self.buffers.values() if tensor is not None)
        yield from self.tensors.values()


class LayerState(NamedTuple):
    """The states of a layer's modules, in the order of ``pairs``; tensors are ``source``'s, complete once ``ready``."""

    modules: tuple[ModuleState, ...]
    source: Device
    ready: Event


class Writers:
    """Which of the user's modules write to their tensors in a forward. Shared by all devices."""

    def __init__(self) -> None:
        self.known: set[int] = set()  # by id

    def add(self, module: nn.Module) -> None:
        self.known.add(id(module))


class LayerWatch:
    """Looks after one replica of a layer, for one visit. Used by the worker that made it, on the compute lane."""

    def __init__(
        self,
        replicas: Sequence[tuple[nn.Module, nn.Module]],
        device: Device,
        buffers: BufferCache,
        silent: SilentWrites,
        writers: Writers,
        modes: Modes,
    ) -> None:
        self._replicas = replicas
        self._device = device
        self._buffers = buffers
        self._silent = silent
        self._writers = writers
        self._modes = modes
        self._ids = {id(owner) for owner, _ in replicas}
        self._state: LayerState | None = None  # the last one looked at or restored
        self._versions: dict[int, int] = {}
        self._remember()

    def _remember(self) -> None:
        """What the replicas look like now."""
        self._dicts = [held for _, replica in self._replicas for held in (replica.__dict__, replica._buffers)]
        self._seen = self._look()

    def _look(self) -> tuple[Any, ...]:
        """All names and values. One tuple, because this is done for every layer and microbatch."""
        return tuple(chain(chain.from_iterable(self._dicts), chain.from_iterable(map(dict.values, self._dicts))))

    def _is_as_left(self) -> bool:
        """Whether nobody has set anything or can have written to a tensor since ``_remember``."""
        if not self._writers.known.isdisjoint(self._ids):
            return False
        now = self._look()
        return len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))

    def look(self) -> LayerState:
        """The state now; the same as last time if nothing has changed, which is nearly always."""
        if self._state is not None and self._is_as_left():
            return self._state
        copies = _Copies()
        modules = tuple(self._take(owner, replica, copies) for owner, replica in self._replicas)
        self._state = LayerState(modules, self._device, self._device.compute.record())
        self._versions = {id(t): t._version for module in modules for t in module.all_tensors()}
        self._remember()
        return self._state

    def _take(self, owner: nn.Module, replica: nn.Module, copies: "_Copies") -> ModuleState:
        own = {name: value for name, value in replica.__dict__.items() if name not in STRUCTURE}
        tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        buffers = replica._buffers.copy()
        if not (tensors.keys() <= owner.__dict__.keys() and buffers.keys() <= owner._buffers.keys()):
            self._writers.add(owner)  # because what a forward has made it may also write to
        if id(owner) in self._writers.known:  # see [2]
            tensors = {name: copies.of(value) for name, value in tensors.items()}
            buffers = {name: value if value is None else copies.of(value) for name, value in buffers.items()}
        return ModuleState({name: value for name, value in own.items() if is_plain(value)}, buffers, tensors)

    def learn_writes(self) -> None:
        """After a forward that ``look`` came before: see [3]."""
        assert self._state is not None
        if not self._versions:
            return
        for (owner, replica), state in zip(self._replicas, self._state.modules, strict=True):
            is_open = (state.buffers or state.tensors) and id(owner) not in self._writers.known
            if is_open and self._has_written(owner, replica, state):
                self._writers.add(owner)

    def _has_written(self, owner: nn.Module, replica: nn.Module, state: ModuleState) -> bool:
        placed = [*_beside(owner._buffers, state.buffers), *_beside(owner.__dict__, state.tensors)]
        openly = {id(tensor) for _, tensor in placed if tensor._version != self._versions[id(tensor)]}
        # If a module wrote one tensor openly, it may have written the others silently.
        has_written = look_again = bool(openly) or not state.is_held_by(replica)
        training = self._modes.training.get(id(owner), owner.training)
        for original, tensor in placed:
            is_written = id(tensor) in openly
            if not is_written and (look_again or self._silent.is_new(original, training)):
                is_written = not torch.equal(tensor.cpu(), original.cpu())
                if is_written:
                    self._silent.note(original)
            if is_written:
                self._give_back(tensor, original)
                has_written = True
        return has_written

    def _give_back(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        written = tensor.detach()
        for owner, replica in self._replicas:
            for held in (replica._buffers, replica.__dict__):
                for name in [name for name, value in held.items() if value is tensor]:
                    held[name] = written
                    self._writers.add(owner)  # as good as: it shares the tensor with whoever writes
        tensor.data = original.detach().to(self._device.torch_device, copy=True)

    def restore(self, state: LayerState) -> None:
        """The modules are as ``state`` has them, whatever a forward has done to them since."""
        if state is self._state and self._is_as_left():
            return
        copies = _Copies()

        def local(tensor: torch.Tensor, owner: nn.Module) -> torch.Tensor:
            brought = self._buffers.bring(tensor, state.source, state.ready)
            return copies.of(brought) if id(owner) in self._writers.known else brought

        for (owner, replica), module in zip(self._replicas, state.modules, strict=True):
            attributes = replica.__dict__
            for name in [name for name, value in attributes.items() if name not in STRUCTURE and _is_kept(value)]:
                del attributes[name]
            attributes.update(module.attributes)
            attributes.update({name: local(tensor, owner) for name, tensor in module.tensors.items()})
            attributes["_buffers"] = {
                name: None if tensor is None else local(tensor, owner) for name, tensor in module.buffers.items()
            }
        self._state = state
        self._remember()


def _is_kept(value: Any) -> bool:
    return is_plain(value) or isinstance(value, torch.Tensor)


def _beside(
    originals: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The user's own tensors, each with the device's."""
    for name, tensor in tensors.items():
        original = originals.get(name)
        if tensor is not None and isinstance(original, torch.Tensor):
            yield original, tensor


class _Copies:
    """One copy of each tensor, because modules of a layer may share one."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with torch.no_grad():
                copy = copied(tensor) if tensor.layout is torch.strided else tensor.clone()
            self._made[id(tensor)] = tensor, copy
        return self._made[id(tensor)][1]
