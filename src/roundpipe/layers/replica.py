"""A layer as one stage run sees it: the user's modules, shallowly copied, with parameters and
buffers on the device.

Each stage run has a replica of its own, because hooks, adapters and train/eval flags of the user's
modules may change between calls and because two devices may run the same layer at the same time.
Replicas share everything but tensors.

[Note: replicas used again] Copying the 80 modules of a layer with adapters takes longer than
queueing its kernels. So a stage run leaves its replica to the next one on its device if that would
see the same in a new one:
[1] Nobody has set anything on the replica: all names and values of its modules are, by identity,
    what they were.
[2] Names and values of the user's modules, their classes and modes are what they were when the
    replica was made.
[3] There is no more to it than names and values. Hooks, code bound to values that may be bound
    anew, containers with modules or parameters in them and tensors set as plain attributes have
    their layer copied each time.
[4] Tensors are put in for every stage run and taken out after it: a replica that waits keeps no
    memory of the device.
"""

import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ..recompute.own_draws import OwnDraws, Source, sources_of
from .contents import items, with_inner
from .modes import HOOKS, Modes, hook_tables
from .rebinding import CODE, is_bound_for_good, is_rebound, rebound
from .structure import Snapshot

TensorMap = Callable[[torch.Tensor], torch.Tensor]
_CONTAINERS = (list, tuple, dict)
_TREES = ("_parameters", "_buffers", "_modules")
STRUCTURE = (*_TREES, *HOOKS, "training", "forward")
_TABLES = frozenset(
    (
        *HOOKS,
        *("_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    )
)
# What `nn.Module.compile` leaves: the user's own module, compiled.
_COMPILED = "_compiled_call_impl"
# Types of most of what modules have, which nothing needs to be done for. Empty hook tables are
# ordered dictionaries.
_INERT = frozenset({bool, int, float, str, set, type(None), torch.dtype, OrderedDict, type})
_NOTHING = object()


def replicate(
    module: nn.Module, parameters: dict[int, nn.Parameter], place: TensorMap, modes: Modes
) -> nn.Module:
    """Copies ``module``'s structure.

    Args:
        parameters: resident parameters by the ``id`` of the working parameter.
        place: gives the device's copy of a buffer or of a tensor held as a plain attribute.
    """
    return _Replication(module, parameters, place, modes).of(module)


class _Socket(NamedTuple):
    """Where a replica has a tensor of the device, and which of the user's, ``key`` by ``id``, it
    stands for."""

    tensors: dict[str, Any]
    name: str
    original: torch.Tensor
    key: int


class Replica:
    """A layer's replica: ``module``, and in ``pairs`` every module of the user's beside its own, as
    it was made.

    Used by one device's worker. See [Note: replicas used again].

    Args:
        finish: what else is set on ``module``.
    """

    def __init__(
        self,
        layer: nn.Module,
        parameters: dict[int, nn.Parameter],
        place: TensorMap,
        modes: Modes,
        finish: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        owners = list(layer.modules())
        # Taken first, because the caller may be setting something while a late stage run makes
        # this.
        trees = (vars(owner)[tree] for owner in owners for tree in _TREES)
        theirs = Snapshot(map(attributes_of, owners), trees, sized=map(vars, owners))
        replication = _Replication(layer, parameters, place, modes)
        self.module = replication.of(layer)
        finish(self.module)
        self.pairs = pairs(layer, self.module)
        self.with_buffers = [pair for pair in self.pairs if pair[1]._buffers]
        self._owners = owners
        self._ids = list(map(id, owners))
        self._is_only_values = (
            replication.is_only_values
            and {id(owner) for owner, _ in self.pairs} == replication.modules == set(self._ids)
            and all(key in modes.training and key not in modes.hooks for key in self._ids)
        )
        if self._is_only_values:
            self._theirs = theirs
            self._remember(replication.containers, modes)

    def _remember(self, containers: Iterable[Any], modes: Modes) -> None:
        self._replicas = replicas = [replica for _, replica in self.pairs]
        self._classes = [list(map(type, modules)) for modules in (self._owners, replicas)]
        self._training = list(map(modes.training.get, self._ids))
        self._hook_tables = [table for owner in self._owners for table in hook_tables(owner)]
        self._shared = Snapshot((), containers)
        children = (replica._modules for replica in replicas)
        self._ours = Snapshot(map(attributes_of, replicas), children, sized=map(vars, replicas))
        self._tensors = Snapshot(
            (), (held for own in replicas for held in (own._parameters, own._buffers))
        )
        self._sockets = [
            _Socket(tensors, name, original, id(original))
            for owner, replica in self.pairs
            for tensors, originals in (
                (replica._parameters, owner._parameters),
                (replica._buffers, owner._buffers),
            )
            for name, original in originals.copy().items()
            if original is not None
        ]

    @cached_property
    def _random_sources(self) -> list[Source]:
        return sources_of(self._owners)

    def draws(self) -> OwnDraws:
        """What its next run draws from. Sources that all share are looked at once, because that
        takes 0.1 ms."""
        draws = OwnDraws(self._random_sources)
        self._random_sources = [source for source in self._random_sources if not source.is_shared]
        return draws

    @property
    def is_as_made(self) -> bool:
        """Whether nobody can have set anything on its modules. Tensors may have been written to."""
        return self._is_only_values and self._ours.is_true and self._tensors.is_true

    def fits(self, modes: Modes) -> bool:
        """Whether another one, made now, would be the same but for tensors."""
        return (
            self._is_only_values
            and list(map(modes.training.get, self._ids)) == self._training
            and modes.hooks.keys().isdisjoint(self._ids)
            and not any(self._hook_tables)
            and [list(map(type, modules)) for modules in (self._owners, self._replicas)]
            == self._classes
            and self._theirs.is_true
            and self._shared.is_true
        )

    def fill(self, parameters: dict[int, nn.Parameter], place: TensorMap) -> None:
        """A stage run begins with a replica that was emptied."""
        # Because what modules share their replicas share.
        filled: dict[int, torch.Tensor] = dict(parameters)
        for tensors, name, original, key in self._sockets:
            if key not in filled:
                filled[key] = place(original)
            tensors[name] = filled[key]
        self._tensors.take()

    def empty(self) -> None:
        """A stage run is over that has left it as it was made. It holds on to no slot, which the
        pool may drop."""
        for tensors, name, *_ in self._sockets:
            tensors[name] = None
        self._tensors.forget()


def attributes_of(module: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Where they are, and their names, but for tables of hooks, which replicas share."""
    own = module.__dict__
    return own, [name for name in list(own) if name not in _TABLES]


class _Replication:
    def __init__(
        self, root: nn.Module, parameters: dict[int, nn.Parameter], place: TensorMap, modes: Modes
    ) -> None:
        self._root = root
        self._inside: set[int] | None = None  # the modules there are, by id; seldom needed
        self._modes = modes
        self._parameters = parameters
        self._place = place
        self._done: dict[int, nn.Module] = {}
        # Because what modules share their replicas share.
        self._placed: dict[int, torch.Tensor] = {}
        self.is_only_values = True  # see [Note: replicas used again]
        # Those that replicas share with the user's modules, for as long as they do.
        self.containers: list[Any] = []

    @property
    def modules(self) -> set[int]:
        """The user's that were copied, by id."""
        return set(self._done)

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) in self._done:
            return self._done[id(module)]
        replica = module.__new__(type(module))
        self._done[id(module)] = replica
        # Copies, because the caller may be writing what an earlier part of the call has set.
        state = module.__dict__.copy()
        state.pop(_COMPILED, None)
        for name, value in state.items():
            if type(value) not in _INERT and name not in _TREES:
                state[name] = self._attribute(module, replica, value)
        state["_parameters"] = {name: self._tensor(p) for name, p in module._parameters.items()}
        state["_buffers"] = {name: self._tensor(b) for name, b in module._buffers.copy().items()}
        state["_modules"] = {
            n: None if child is None else self.of(child) for n, child in module._modules.items()
        }
        hooks = self._modes.hooks_of(module)
        for name in HOOKS:
            if state[name] or name in hooks:
                then = hooks.get(name, {})
                state[name] = OrderedDict(
                    (key, rebound(hook, self._counterpart)) for key, hook in then.items()
                )
        state["training"] = self._modes.training.get(id(module), module.training)
        # Because a module's own looks at what it is given.
        object.__setattr__(replica, "__dict__", state)
        return replica

    def _tensor(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        resident = self._parameters.get(id(tensor))
        if resident is not None:
            return resident
        if id(tensor) not in self._placed:
            self._placed[id(tensor)] = self._place(tensor)
        return self._placed[id(tensor)]

    def _attribute(self, module: nn.Module, replica: nn.Module, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.is_only_values = False
            return self._tensor(value)
        if isinstance(value, CODE):
            self.is_only_values &= is_bound_for_good(value)
            return rebound(value, self._counterpart)
        if type(value) in _CONTAINERS and not self._note_container(value):
            self.is_only_values = False
            if self._is_state(value):
                return self._container(module, replica, value)
        return value

    def _note_container(self, value: Any) -> bool:
        """Whether there are neither modules nor tensors in it, so that it is shared as long as that
        stays so."""
        found = with_inner([value])
        self.containers += found.containers
        return not found.has((nn.Module, torch.Tensor))

    def _counterpart(self, value: Any) -> Any:
        """What stands for something that code refers to. What is outside of the layer, and plain
        tensors, stay."""
        if isinstance(value, nn.Module):
            if self._inside is None:
                self._inside = {id(module) for module in self._root.modules()}
            return self.of(value) if id(value) in self._inside else value
        return self._parameters.get(id(value), value) if isinstance(value, nn.Parameter) else value

    def _container(self, module: nn.Module, replica: nn.Module, value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)(
                (key, self._item(module, replica, item)) for key, item in value.copy().items()
            )
        return type(value)(self._item(module, replica, item) for item in items(value))

    def _item(self, module: nn.Module, replica: nn.Module, item: Any) -> Any:
        return (
            self.of(item) if isinstance(item, nn.Module) else self._attribute(module, replica, item)
        )

    def _is_state(self, value: Any) -> bool:
        """Whether a container holds parameters of the layer, or modules that do: recurrent modules
        keep such lists.

        Other containers, a list that a hook appends to for example, stay the user's own.
        """
        held = chain.from_iterable(map(items, with_inner([value]).containers))
        return any(map(self._has_parameter, held))

    def _has_parameter(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return any(id(parameter) in self._parameters for parameter in value.parameters())
        return isinstance(value, torch.Tensor) and id(value) in self._parameters


def pairs(module: nn.Module, replica: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Every module of the user's, once, beside its replica; parents first."""
    found = {id(module): (module, replica)}
    left = [(module, replica)]
    while left:
        original, copy = left.pop()
        for name, child in original._modules.items():
            other = copy._modules.get(name)
            if child is not None and other is not None and id(child) not in found:
                found[id(child)] = child, other
                left.append((child, other))
    return list(found.values())


def attributes_set(original: nn.Module, replica: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of ``replica`` that are not the user's own: set by a forward, or made for the
    device."""
    theirs = original.__dict__
    changed = [
        item for item in replica.__dict__.items() if item[1] is not theirs.get(item[0], _NOTHING)
    ]
    return ((name, value) for name, value in changed if name not in STRUCTURE)


def is_plain(value: Any) -> bool:
    """Whether an attribute of a replica is the user's own, neither made for the device nor bound to
    the replica."""
    is_ours = isinstance(value, (torch.Tensor, types.MethodType)) or is_rebound(value)
    return not is_ours and type(value) not in _CONTAINERS
