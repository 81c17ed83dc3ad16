"""A layer as one visit sees it: the user's modules, shallowly copied, with parameters and buffers on the device.

Each visit makes its own replica, because hooks, adapters and train/eval flags of the user's modules may change between
calls and because two devices may run the same layer at the same time. Replicas share everything but tensors.
"""

import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .rebinding import CODE, is_rebound, rebound
from .structure import Structure

TensorMap = Callable[[torch.Tensor], torch.Tensor]
_CONTAINERS = (list, tuple, dict)
_TREES = ("_parameters", "_buffers", "_modules")
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    # How those are to be called.
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
STRUCTURE = (*_TREES, *_HOOKS, "training", "forward")
# What `nn.Module.compile` leaves: the user's own module, compiled.
_COMPILED = "_compiled_call_impl"
# Types of most of what modules have, which nothing needs to be done for. Empty hook tables are ordered dictionaries.
_INERT = frozenset({bool, int, float, str, set, type(None), torch.dtype, OrderedDict, type})
_NOTHING = object()
Hooks = dict[str, dict[int, Any]]
_NO_HOOKS: Hooks = {}


@dataclass(frozen=True)
class Modes:
    """Which modules and parameters train, and the hooks of modules that have some, as it was when a call was made.

    A late visit must not see what the caller has switched or removed since: a recompute in another mode is another
    computation.
    """

    training: dict[int, bool]
    trains: frozenset[int]
    hooks: dict[int, Hooks]

    def hooks_of(self, module: nn.Module) -> Hooks:
        """By the names of `nn.Module`'s tables; empty ones are left out."""
        is_known = id(module) in self.training
        return self.hooks.get(id(module), _NO_HOOKS) if is_known else _hooks_now(module)

    @classmethod
    def of(cls, structure: Structure) -> "Modes":
        return cls(
            training={id(module): module.training for module in structure.modules},
            trains=frozenset(id(parameter) for parameter in structure.parameters if parameter.requires_grad),
            hooks={id(module): hooks for module in structure.modules if (hooks := _hooks_now(module))},
        )


def _hooks_now(module: nn.Module) -> Hooks:
    own = module.__dict__
    return {name: own[name].copy() for name in _HOOKS if own[name]}


def replicate(module: nn.Module, parameters: dict[int, nn.Parameter], place: TensorMap, modes: Modes) -> nn.Module:
    """Copies ``module``'s structure.

    Args:
        parameters: resident parameters by the ``id`` of the working parameter.
        place: gives the device's copy of a buffer or of a tensor held as a plain attribute.
    """
    return _Replication(module, parameters, place, modes).of(module)


class _Replication:
    def __init__(self, root: nn.Module, parameters: dict[int, nn.Parameter], place: TensorMap, modes: Modes) -> None:
        self._root = root
        self._inside: set[int] | None = None  # the modules there are, by id; seldom needed
        self._modes = modes
        self._parameters = parameters
        self._place = place
        self._done: dict[int, nn.Module] = {}
        self._placed: dict[int, torch.Tensor] = {}  # because what modules share their replicas share

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
        state["_modules"] = {n: None if child is None else self.of(child) for n, child in module._modules.items()}
        hooks = self._modes.hooks_of(module)
        for name in _HOOKS:
            if state[name] or name in hooks:
                then = hooks.get(name, {})
                state[name] = OrderedDict((key, rebound(hook, self._counterpart)) for key, hook in then.items())
        state["training"] = self._modes.training.get(id(module), module.training)
        object.__setattr__(replica, "__dict__", state)  # because a module's own looks at what it is given
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
            return self._tensor(value)
        if isinstance(value, CODE):
            return rebound(value, self._counterpart)
        if type(value) in _CONTAINERS and value and self._is_state(value):
            return self._container(module, replica, value)
        return value

    def _counterpart(self, value: Any) -> Any:
        """What stands for something that code refers to. What is outside of the layer, and plain tensors, stay."""
        if isinstance(value, nn.Module):
            if self._inside is None:
                self._inside = {id(module) for module in self._root.modules()}
            return self.of(value) if id(value) in self._inside else value
        return self._parameters.get(id(value), value) if isinstance(value, nn.Parameter) else value

    def _container(self, module: nn.Module, replica: nn.Module, value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((key, self._item(module, replica, item)) for key, item in value.items())
        return type(value)(self._item(module, replica, item) for item in value)

    def _item(self, module: nn.Module, replica: nn.Module, item: Any) -> Any:
        return self.of(item) if isinstance(item, nn.Module) else self._attribute(module, replica, item)

    def _is_state(self, value: Any) -> bool:
        """Whether a container holds parameters of the layer, or modules that do: recurrent modules keep such lists.

        Other containers, a list that a hook appends to for example, stay the user's own.
        """
        if type(value) in _CONTAINERS:
            return any(self._is_state(item) for item in (value.values() if isinstance(value, dict) else value))
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
    """The attributes of ``replica`` that are not the user's own: set by a forward, or made for the device."""
    theirs = original.__dict__
    changed = [item for item in replica.__dict__.items() if item[1] is not theirs.get(item[0], _NOTHING)]
    return ((name, value) for name, value in changed if name not in STRUCTURE)


def is_plain(value: Any) -> bool:
    """Whether an attribute of a replica is the user's own, neither made for the device nor bound to the replica."""
    is_ours = isinstance(value, (torch.Tensor, types.MethodType)) or is_rebound(value)
    return not is_ours and type(value) not in _CONTAINERS
