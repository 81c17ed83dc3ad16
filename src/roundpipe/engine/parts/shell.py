"""The user's model as one forward on the CPU sees it: shallow copies in which some modules call
engines.

The model itself is never changed, so its names, keys and methods stay its own. A shell is made for
every forward, because hooks, modes and attributes of the user's modules may change between them.
"""

import copy as copying
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...layers.modes import Modes
from ...layers.replica import attributes_set, pairs, replicate
from ...layers.structure import Structure
from .find import is_sequence

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Whether transformers has put its hooks on the modules below that collect hidden states for whoever
# asks.
_COLLECTS = "_output_capturing_hooks_installed"
_SET_HERE = ("gradient_checkpointing", "_loss_function", _COLLECTS)
_NOTHING = object()


class Shell(NamedTuple):
    """``root`` is called in the model's place; ``write_back`` afterwards takes over what its
    forward has set."""

    root: nn.Module
    write_back: Callable[[], None]


def make_shell(
    model: nn.Module,
    residents: Mapping[int, nn.Parameter],
    engines: Mapping[int, Callable[..., Any]],
    loss: Callable[..., Any] | None,
) -> Shell:
    """Copies ``model``'s structure.

    Args:
        residents: what stands for each parameter, by the ``id`` of the working copy.
        engines: what to call instead of a module's forward, by the ``id`` of the module.
        loss: what to call instead of a Hugging Face model's ``loss_function``.
    """
    root = replicate(model, dict(residents), lambda tensor: tensor, Modes.of(Structure([model])))
    on_cpu = []
    for module, copy in pairs(model, root):
        engine = engines.get(id(module))
        if engine is not None:
            copy.__dict__["forward"] = engine
            if not is_sequence(module):  # whose own hooks its layers do not know
                copy.__dict__.update((name, OrderedDict()) for name in _HOOKS)
        else:
            on_cpu.append((module, copy))
        _drop_collecting_hooks(copy)
        if copy.__dict__.get("gradient_checkpointing"):
            copy.__dict__["gradient_checkpointing"] = False  # engines recompute already
        if loss is not None and isinstance(getattr(type(module), "loss_function", None), property):
            copy.__dict__["_loss_function"] = loss
    configs = _without_cache(copy for _, copy in on_cpu)
    ours = {id(resident) for resident in residents.values()} | {
        id(config.copy) for config in configs
    }

    def write_back() -> None:
        _write_back(on_cpu, ours)
        for config in configs:
            config.write_back()

    return Shell(root, write_back)


class _Config(NamedTuple):
    """A model's config and what its copy has in its place."""

    own: Any
    copy: Any

    def write_back(self) -> None:
        for name, value in vars(self.copy).items():
            if name != "use_cache" and value is not vars(self.own).get(name, _NOTHING):
                setattr(self.own, name, value)


def _without_cache(copies: Iterable[nn.Module]) -> list[_Config]:
    """Has models of transformers among ``copies`` build no key-value cache, to which all
    microbatches would write.

    By their configs, because code around a decoder seldom says ``use_cache=False`` and drops the
    cache it gets.
    """
    transformers: Any = sys.modules.get("transformers")
    made: dict[int, _Config] = {}
    for copy in copies if transformers is not None else ():
        config = copy.__dict__.get("config")
        if isinstance(copy, transformers.PreTrainedModel) and getattr(config, "use_cache", False):
            if id(config) not in made:
                made[id(config)] = _Config(config, copying.copy(config))
                made[id(config)].copy.use_cache = False
            copy.__dict__["config"] = made[id(config)].copy
    return list(made.values())


def _drop_collecting_hooks(copy: nn.Module) -> None:
    """Has transformers put them on this forward's copies, if it wants them: on a worker they
    collect for nobody."""
    copy.__dict__.pop(_COLLECTS, None)
    hooks = copy._forward_hooks.items()
    copy.__dict__["_forward_hooks"] = OrderedDict(
        (key, hook)
        for key, hook in hooks
        if getattr(hook, "__name__", "") != "output_capturing_hook"
    )


def _write_back(on_cpu: list[tuple[nn.Module, nn.Module]], ours: set[int]) -> None:
    """What forwards have set on copies goes to the modules; what was written in place is the
    modules' own memory.

    ``ours``: ``id`` of what the shell was given.
    """
    for module, copy in on_cpu:
        for name, value in copy._buffers.items():
            if value is not module._buffers.get(name):
                module._buffers[name] = value
        for name, value in attributes_set(module, copy):
            if name not in _SET_HERE and id(value) not in ours:
                module.__dict__[name] = value
        for name, value in copy.__dict__.items():
            is_set = isinstance(value, torch.Tensor) and value is not module.__dict__.get(name)
            if is_set and id(value) not in ours:
                module.__dict__[name] = value
