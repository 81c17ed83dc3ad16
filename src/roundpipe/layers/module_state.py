"""The state of a layer's modules but for their weights: what is kept of it, and what a replica has
of it. See [Note: looking before a forward] in `snapshot.py`."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..device import Device, Event
from .buffers import BufferValue
from .contents import Contents, is_container
from .structure import Snapshot

_NOTHING = object()
# A set of names among them, which no forward looks at.
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
KeptTensor = torch.Tensor | BufferValue  # by [2] or by [1]


class ModuleState(NamedTuple):
    """Plain attributes, buffers, and tensors set as plain attributes, by name."""

    attributes: dict[str, Any]
    buffers: dict[str, KeptTensor | None]
    tensors: dict[str, KeptTensor]

    def is_that_of(self, attributes: dict[str, Any], kept: Iterable[str]) -> bool:
        """Whether a module without tensors of its own has these ``attributes``, of which ``kept``
        are what is kept."""
        return (
            not (self.buffers or self.tensors)
            and all(
                attributes.get(name, _NOTHING) is value for name, value in self.attributes.items()
            )
            and all(name in self.attributes for name in kept)
        )

    def containers(self) -> dict[str, Any]:
        """Those among the attributes."""
        return {
            n: value
            for n, value in self.attributes.items()
            if is_container(value) and n not in _OF_ALL_MODULES
        }

    def kept(self) -> Iterator[KeptTensor]:
        yield from (kept for kept in self.buffers.values() if kept is not None)
        yield from self.tensors.values()


class LayerState(NamedTuple):
    """The states of a layer's modules, in the order of ``pairs``; copies are ``source``'s, complete
    once ``ready``.

    ``contents``: of the containers among all attributes, see [4].
    """

    modules: tuple[ModuleState, ...]
    contents: Contents
    source: Device
    ready: Event


class Loan:
    """Copies of the containers of ``state``, which replicas have in the places of those during a
    recompute: see [4]."""

    def __init__(self, state: LayerState, replicas: Iterable[nn.Module]) -> None:
        self.state = state
        copies = state.contents.copies()
        self._contents = Snapshot((), copies.values())
        self._places = [
            (replica.__dict__, own, {name: copies[id(value)] for name, value in own.items()})
            for replica, module in zip(replicas, state.modules, strict=True)
            if (
                own := {
                    name: value
                    for name, value in module.containers().items()
                    if id(value) in copies
                }
            )
        ]
        self.is_out = False

    @property
    def is_unwritten(self) -> bool:
        return self._contents.is_true

    def begin(self) -> None:
        self.is_out = True
        for attributes, _, copies in self._places:
            attributes.update(copies)

    def end(self) -> None:
        for attributes, own, _ in self._places:
            attributes.update(own)
        self.is_out = False


class ModuleTensors(NamedTuple):
    """The tensors of a module's replica but for its weights: buffers, and those set as plain
    attributes."""

    buffers: dict[str, torch.Tensor | None]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, replica: nn.Module) -> "ModuleTensors":
        tensors = {name: value for name, value in replica.__dict__.items() if is_tensor(value)}
        return cls(replica._buffers.copy(), tensors)

    def is_still_of(self, replica: nn.Module) -> bool:
        """Whether the module still has these very tensors, written to or not."""
        return (
            replica._buffers.keys() == self.buffers.keys()
            and all(map(operator.is_, replica._buffers.values(), self.buffers.values()))
            and all(replica.__dict__.get(name) is tensor for name, tensor in self.tensors.items())
        )

    def has_only_names_of(self, owner: nn.Module) -> bool:
        return (
            self.tensors.keys() <= owner.__dict__.keys()
            and self.buffers.keys() <= owner._buffers.keys()
        )

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


def is_tensor(value: Any) -> bool:
    """But for weights, of which a replica's are those of its stage run."""
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
