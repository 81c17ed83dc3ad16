"""A model's own forward, run in parts: up to its first block, and from its last block on.

[Note: the model's own forward] Nothing of an unknown architecture's masks, positions, scalings or
soft caps is written down here. The model's forward itself runs, on a shallow copy of the model
whose blocks are stand-ins. In the first part they note what each block is called with, and the last
one ends the run. In the last part they let pass what they are given, but for the last one, which
returns the true hidden states. What comes before the blocks runs once more there, on embeddings of
zeros: a few small kernels, and what they make is not used. Nor is what they write, such as rotary
frequencies: two layers would write one buffer.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ..errors import ConfigError
from .calling import put_back
from .preset import DoesNotFit

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Code that runs the container itself instead of its twin.
_BOUND = ("forward", "_compiled_call_impl")


class SkippedBlocks(ConfigError):
    """The model's forward has not called all of its blocks."""

    def __init__(self, num_called: int, number: int) -> None:
        super().__init__(
            f"the model's forward called {num_called} of its {number} blocks before it went on "
            "(layer drop?), but was cut into layers that all run. Switch that off, or pass "
            "use_sequential_preset=False"
        )


class BlockCall(NamedTuple):
    """What the model calls one block with besides the hidden states, which come first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Blocks(NamedTuple):
    """Where a model's list of blocks is, and what a block returns.

    ``path``: names of attributes from the model to the list. ``num_returned``: the length of the
    tuple of which hidden states are the first; None if a block returns them alone.
    """

    path: tuple[str, ...]
    number: int
    num_returned: int | None

    def returned(self, hidden_states: torch.Tensor) -> Any:
        """As a block would return it."""
        return (
            hidden_states
            if self.num_returned is None
            else (hidden_states, *[None] * (self.num_returned - 1))
        )


class _Original:
    """The model's containers, from itself down to the one that holds the blocks.

    No module and no plain container, on purpose: a part that owned the model would own every
    layer's parameters.
    """

    def __init__(self, model: nn.Module, path: Sequence[str]) -> None:
        self.containers = [model]
        for name in path[:-1]:
            self.containers.append(getattr(self.containers[-1], name))


class Part(nn.Module):
    """The modules that one part of ``model``'s forward calls, and what its containers hold
    themselves.

    ``is_called`` says of each module directly in a container, by its name from the model on,
    whether it is called. ``attributes``: what containers have in place of their own attributes of
    these names in every run.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, is_called: Callable[[str], bool]) -> None:
        super().__init__()
        self.blocks = blocks
        self.attributes: dict[str, Any] = {}
        self.original = _Original(model, blocks.path)
        self.owned = nn.ModuleList()
        for depth, (container, inner) in enumerate(
            zip(self.original.containers, blocks.path, strict=True)
        ):
            owned = nn.Module()
            owned._parameters = dict(container._parameters)
            owned._buffers = dict(container._buffers)
            for name, child in container.named_children():
                if name != inner and is_called(".".join((*blocks.path[:depth], name))):
                    owned.add_module(name, child)
            self.owned.append(owned)

    def first(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, list[BlockCall]]:
        """Runs up to the first block: its hidden states, and what each block is called with.

        ``kwargs`` may have ``instead`` and ``attributes`` of this run.
        """
        if kwargs.get("is_causal") is not None:
            raise ConfigError(
                "is_causal: transformers carries it in the config, which all microbatches share; "
                "set it there"
            )
        notes = _Notes(self.blocks)
        noting = [_Noting(notes) for _ in range(self.blocks.number)]
        try:
            self._run(noting, *args, elsewhere=_Behind(notes), **kwargs)
        except _Reached:
            return notes.hidden_states, notes.calls
        raise SkippedBlocks(len(notes.calls), self.blocks.number)

    def last(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs from the last block on, ``hidden_states`` being what that returned."""
        with self._passing(hidden_states) as passing:
            output = self._run(passing, *args, **kwargs)
        self._refuse_skipped(passing)
        return output

    def into(
        self,
        name: str,
        hidden_states: torch.Tensor,
        *,
        instead: Mapping[str, nn.Module] = {},
        **kwargs: Any,
    ) -> torch.Tensor:
        """Runs from the last block up to the model's own module ``name``, and returns what that
        would be called with.

        Raises:
            ConfigError: it was not called.
        """
        notes = _Notes(self.blocks._replace(number=1))
        try:
            with self._passing(hidden_states) as passing:
                noting = _Noting(notes, self.owned[0].get_submodule(name))
                self._run(passing, instead={**instead, name: noting}, **kwargs)
        except _Reached:
            self._refuse_skipped(passing)
            return notes.hidden_states
        raise ConfigError(f"the model's forward did not call {name}")

    @contextmanager
    def _passing(self, hidden_states: torch.Tensor) -> Iterator[list["_Passing"]]:
        with put_back(self.owned) as end:
            passing = [_Passing(self.blocks, None, end) for _ in range(self.blocks.number - 1)]
            yield [*passing, _Passing(self.blocks, hidden_states, end)]

    def _refuse_skipped(self, passing: Sequence["_Passing"]) -> None:
        """Raises if the last block's hidden states did not get into the forward."""
        if not passing[-1].was_called:
            raise SkippedBlocks(sum(each.was_called for each in passing), self.blocks.number)

    def _run(
        self,
        stand_ins: Sequence[nn.Module],
        *args: Any,
        instead: Mapping[str, nn.Module] = {},
        elsewhere: nn.Module | None = None,
        attributes: Mapping[str, Any] = {},
        **kwargs: Any,
    ) -> Any:
        """``instead`` stands for modules by their names from the model on, ``elsewhere`` for all
        that are not in this part, ``attributes`` for those of containers that have them."""
        # Of a module that is called, because nobody keeps the modes of those that only hold modules
        # up to date.
        training = next(child for owned in self.owned for child in owned.children()).training
        inner: nn.Module = nn.ModuleList(stand_ins)
        path, others = self.blocks.path, {**self.attributes, **attributes}
        levels = zip(self.original.containers, self.owned, range(len(path)), strict=True)
        for container, owned, depth in reversed(list(levels)):
            twin = container.__new__(type(container))
            state = {key: value for key, value in container.__dict__.items() if key not in _BOUND}
            state |= {
                "_parameters": owned._parameters,
                "_buffers": owned._buffers,
                "training": training,
            }
            left_out = dict.fromkeys(container._modules, elsewhere) if elsewhere else {}
            here = "".join(f"{name}." for name in path[:depth])
            stand_in = {
                name: instead[here + name] for name in container._modules if here + name in instead
            }
            state |= {
                "_modules": {**left_out, **owned._modules, **stand_in, path[depth]: inner},
                **{hooks: OrderedDict() for hooks in _HOOKS},
                **{name: value for name, value in others.items() if hasattr(container, name)},
            }
            twin.__dict__ = state
            inner = twin
        return inner(*args, **kwargs)


class _Reached(BaseException):
    """Leaves the model's forward at its last block; no ``except Exception`` on the way stops it."""


class _Notes:
    """What blocks are called with. The model must hand each what the one before returned."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.calls: list[BlockCall] = []
        self.hidden_states: torch.Tensor

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_name = dict(kwargs)
        given, *others = args or (by_name.pop("hidden_states"),)
        if self.calls and given is not self.hidden_states:
            raise ConfigError(
                f"the model's forward changes the hidden states before block {len(self.calls)}"
            )
        self.hidden_states = given
        self.calls.append(BlockCall(tuple(others), by_name))
        if len(self.calls) == self.blocks.number:
            raise _Reached


class _Behind(nn.Module):
    """Stands for what comes after the blocks while their calls are noted, of which the last ends
    the run."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self._notes = notes

    def forward(self, *_: Any, **__: Any) -> Any:
        raise SkippedBlocks(len(self._notes.calls), self._notes.blocks.number)


class _Noting(nn.Module):
    """``of``: the module whose attributes it shows, as a forward may ask a head for the dtype of
    its weight."""

    def __init__(self, notes: _Notes, of: nn.Module | None = None) -> None:
        super().__init__()
        self._notes = notes
        self._of = (of,)  # in a tuple, because it must not be registered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._notes.note(args, kwargs)
        return self._notes.blocks.returned(self._notes.hidden_states)


class _Passing(nn.Module):
    """``value``: what it returns; None to let pass what it is given. ``begin`` is called first."""

    def __init__(
        self, blocks: Blocks, value: torch.Tensor | None, begin: Callable[[], None]
    ) -> None:
        super().__init__()
        self._blocks = blocks
        self._value = value
        self._begin = begin
        self.was_called = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        self.was_called = True
        given = args[0] if args else kwargs["hidden_states"]
        return self._blocks.returned(given if self._value is None else self._value)


class Seen(nn.Module):
    """Stands in the model's forward for an encoder, ``of``, and returns what that has made, which
    ``seen`` says in each call."""

    def __init__(self, seen: Callable[[], Any], of: nn.Module) -> None:
        super().__init__()
        self._seen = seen
        self._of = (of,)  # in a tuple, because it must not be registered

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._seen()


def path_of_blocks(model: PreTrainedModel) -> tuple[str, ...]:
    """Where the one list of modules is that transformers says may not be split."""
    classes = set(model._no_split_modules or ())
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and {type(m).__name__ for m in module} <= classes
    ]
    if len(found) != 1:
        raise DoesNotFit(
            f"it has {len(found)} lists of modules of {sorted(classes)}, where one is needed: "
            f"{found}"
        )
    return tuple(found[0].split("."))


def kinds_of(calls: list[BlockCall], layer_types: Sequence[Any]) -> list[int]:
    """Numbers blocks that are called alike alike; never two of different ``layer_types``."""
    kinds: list[int] = []
    types = layer_types if len(layer_types) == len(calls) else [None] * len(calls)
    for index, call in enumerate(calls):
        alike = (k for k in range(index) if types[k] == types[index] and _are_same(call, calls[k]))
        earlier = next(alike, None)
        kinds.append(max(kinds, default=-1) + 1 if earlier is None else kinds[earlier])
    return kinds


def by_kind(calls: list[BlockCall], kinds: list[int], model_class: type) -> tuple[BlockCall, ...]:
    """One call for each kind: shipped once, though many blocks are called with the same mask.

    Raises:
        ConfigError: blocks of one kind are called with different things.
    """
    first = [calls[kinds.index(kind)] for kind in range(max(kinds) + 1)]
    for index, (call, kind) in enumerate(zip(calls, kinds, strict=True)):
        if not _are_same(call, first[kind]):
            raise ConfigError(
                f"block {index} of {model_class.__name__} takes other arguments than block "
                f"{kinds.index(kind)} in this batch, and took the same when the model was wrapped; "
                "pass use_sequential_preset=False"
            )
    return tuple(first)


def _are_same(call: BlockCall, other: BlockCall) -> bool:
    if call is other:
        return True
    leaves, spec = pytree.tree_flatten(call)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(
        a is b or (isinstance(a, bool | int | float | str) and bool(a == b))
        for a, b in zip(leaves, others, strict=True)
    )
