"""Which modules and parameters train, and the hooks of modules, as it was when a call was made."""

import operator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn

from .structure import Structure

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    # How those are to be called.
    *(
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs",
    ),
)
Hooks = dict[str, dict[int, Any]]
_NO_HOOKS: Hooks = {}


@dataclass(frozen=True)
class Modes:
    """Which modules and parameters train, and the hooks of modules that have some, as it was when a
    call was made.

    A late stage run must not see what the caller has switched or removed since: a recompute in
    another mode is another computation.
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
        modules = structure.modules
        # Asked first, because it hardly ever is.
        has_hooks = any(chain.from_iterable(map(hook_tables, modules)))
        return cls(
            training=dict(zip(map(id, modules), map(_training, modules), strict=True)),
            trains=frozenset(
                id(parameter) for parameter in structure.parameters if parameter.requires_grad
            ),
            hooks={id(module): hooks for module in modules if (hooks := _hooks_now(module))}
            if has_hooks
            else {},
        )


_training = operator.attrgetter("training")
_hook_tables = operator.itemgetter(*HOOKS)


def has_hooks(module: nn.Module) -> bool:
    """Says whether its ``__call__`` would do more than run its forward."""
    return any(hook_tables(module))


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """All tables that its ``__call__`` looks into."""
    tables: tuple[dict[int, Any], ...] = _hook_tables(module.__dict__)
    return tables


def _hooks_now(module: nn.Module) -> Hooks:
    own = module.__dict__
    return {name: own[name].copy() for name in HOOKS if own[name]}
