"""What a layer's forward saw of the buffers and attributes of its modules, so that a recompute sees
the same.

By the time of the recompute the modules may be further on: by the microbatches after, by what the
call has written to the user's modules, by later calls, by the user.

[Note: looking before a forward]
[1] Of tensors that nobody writes the value is kept: one copy on the host for all microbatches,
    calls and devices.
[2] Of modules known to write to their tensors (batch norm, spectral norm, running averages) copies
    are kept.
[3] Whoever writes for the first time writes to its device's own copy. That was equal to the value
    kept by [1], from which every device, this one too, makes itself another copy when it
    recomputes.
[4] Forwards have the user's own lists and dictionaries. Recomputes have copies, because the user
    may be putting something else in at that moment, and because what they put in themselves is for
    nobody.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..device import Device
from ..transfer.boundaries import bring, copied
from .buffers import BufferCache
from .contents import Contents, has_tensors, is_container
from .modes import Modes
from .module_state import KeptTensor, LayerState, Loan, ModuleState, ModuleTensors, is_tensor
from .replica import STRUCTURE, attributes_of, attributes_set, is_plain
from .structure import Snapshot


class Writers:
    """Which of the user's modules write to their tensors in a forward. Shared by all devices."""

    def __init__(self) -> None:
        self.known: set[int] = set()  # by id

    def add(self, module: nn.Module) -> None:
        self.known.add(id(module))


class LayerWatch:
    """Looks after one replica of a layer, for one stage run. Used by the worker that made it, on
    the compute lane."""

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
        self._held: list[ModuleTensors] = []  # when it was looked at
        # What of that has to be compared.
        self._unclear: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._versions: dict[int, int] = {}
        self._loan: Loan | None = None  # the last one
        # By id: the replica's own lists, of its modules or weights.
        self._made = {
            id(value): value
            for owner, replica in replicas
            for value in _containers_set(owner, replica)
        }
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
        if self._state is not None and self._is_as_left() and self._state.contents.is_true:
            return self._state
        self._held = [ModuleTensors.of(replica) for _, replica in self._replicas]
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
                value = (
                    self._buffers.value_in(tensor, original)
                    if isinstance(original, torch.Tensor)
                    else None
                )
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
                    if name not in STRUCTURE and self._is_kept_as_it_is(owner, name, value)
                },
                {
                    name: b if b is None else kept(b, owner._buffers.get(name))
                    for name, b in held.buffers.items()
                },
                {
                    name: kept(tensor, owner.__dict__.get(name))
                    for name, tensor in held.tensors.items()
                },
            )
            for (owner, replica), held in zip(self._replicas, self._held, strict=True)
        )
        contents = Contents(value for module in modules for value in module.containers().values())
        self._state = LayerState(modules, contents, self._device, self._device.compute.record())
        self._versions = {
            id(tensor): tensor._version for held in self._held for tensor in held.all()
        }
        self._remember()
        return self._state

    def _is_kept_as_it_is(self, owner: nn.Module, name: str, value: Any) -> bool:
        """Whether an attribute is neither a tensor nor made for the replica. Lists may be the
        user's own, for which he may put others (PEFT does when another adapter is set), or a
        forward's: not those with tensors, because one would be kept for every microbatch."""
        if is_plain(value) or value is owner.__dict__.get(name):
            return True
        return is_container(value) and id(value) not in self._made and not has_tensors([value])

    def _written(self, tensors: Iterable[Iterable[KeptTensor]]) -> set[int]:
        """By id, of each module's tensors those that it, or another one that shares them, is known
        to write."""
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
        for (owner, replica), held, unclear in zip(
            self._replicas, self._held, self._unclear, strict=True
        ):
            is_open = (held.buffers or held.tensors) and id(owner) not in self._writers.known
            if is_open and self._has_written(replica, held, unclear):
                self._writers.add(owner)

    def _has_written(
        self,
        replica: nn.Module,
        held: ModuleTensors,
        unclear: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> bool:
        return (
            not held.is_still_of(replica)
            or any(tensor._version != self._versions[id(tensor)] for tensor in held.all())
            or any(self._buffers.has_changed(original, tensor) for original, tensor in unclear)
        )

    def restore(self, state: LayerState) -> None:
        """The modules are as ``state`` has them, whatever a forward has done to them since, until
        ``give_back``."""
        self.give_back()
        if state is not self._state or not self._is_as_left():
            self._set(state)
        if not state.contents.containers:
            return
        if self._loan is None or self._loan.state is not state:
            self._loan = Loan(state, (replica for _, replica in self._replicas))
        self._loan.begin()

    def give_back(self) -> None:
        """After recomputes: the replica has the user's own lists again."""
        if self._loan is None or not self._loan.is_out:
            return  # because by now the replicas may be those of another state
        self._loan.end()
        if not self._loan.is_unwritten:
            self._loan = None  # because there may be tensors in it, and with them a graph

    @property
    def keeps_tensors(self) -> bool:
        """Whether it holds on to memory that is not the user's own."""
        return self._state is not None and self._state.contents.has_tensors

    def _set(self, state: LayerState) -> None:
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

        for (owner, replica), module in zip(self._replicas, state.modules, strict=True):
            attributes = replica.__dict__
            own = [
                name
                for name, value in attributes.items()
                if name not in STRUCTURE
                and (is_tensor(value) or self._is_kept_as_it_is(owner, name, value))
            ]
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


def _containers_set(owner: nn.Module, replica: nn.Module) -> Iterator[Any]:
    """Those of the replica that are not the user's own."""
    return (value for _, value in attributes_set(owner, replica) if is_container(value))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        copy: torch.Tensor = copied(tensor) if tensor.layout is torch.strided else tensor.clone()
    return copy
