"""One state for a module of the user's and its copy in a shell.

[Note: one owner] What modules hold is the user's modules'. The model's own code sees copies, and
engines run the user's modules, so both are brought in step where one hands over to the other:
[1] Before an engine runs, what own code has set on copies of the engine's modules goes to those
    modules.
[2] After it, what its run has written to them goes to the copies.
[3] When the forward is over, what own code has set on any copy goes to the user's module.
Only what has changed since they were last in step is taken over, so neither side undoes what the
other has done. What was written in place is the same memory on both sides.
"""

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch.utils import _pytree as pytree

from ...errors import ConfigError
from .deferred import Deferred

_NOTHING = object()


class Sides:
    """Which objects stand for which: pairs of the user's own and the shell's."""

    def __init__(self, both: Sequence[tuple[Any, Any]]) -> None:
        self._own = {id(copy): own for own, copy in both}
        self._copies = {id(own): copy for own, copy in both}

    def own(self, value: Any) -> Any:
        """Returns what the user's side has in the place of a value of the shell's; outputs of
        engines merged, because they are memory of devices."""
        own = _replaced(value, self._own)
        return own.plain() if isinstance(own, Deferred) else own

    def copy(self, value: Any) -> Any:
        """Returns what the shell has in the place of a value of the user's."""
        return _replaced(value, self._copies)


def _replaced(value: Any, others: Mapping[int, Any]) -> Any:
    """The other of ``value``, or a list or the like with the others of what is in it: recurrent
    modules make one of their weights."""
    if type(value) in (list, tuple) and any(id(item) in others for item in value):
        return type(value)(others.get(id(item), item) for item in value)
    if type(value) is dict and any(id(item) in others for item in value.values()):
        return {key: others.get(id(item), item) for key, item in value.items()}
    return others.get(id(value), value)


class LostTensor:
    """Stands in a shell for a tensor that a part's forward has set, so that own code that computes
    with it is told, and does not get what was there before.

    ``name``: of the attribute, for the message.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"the model's forward reads {self._name}, a tensor that a module has set which an "
            "engine runs: it has stayed on a device, without its graph. Have the module's forward "
            "return it, or leave the module on the CPU (skip_modules)"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        lost = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return next(lost)._refuse()

    __getattr__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __float__ = __bool__ = __len__ = __getitem__ = __iter__ = _refuse


class Twin:
    """Two dictionaries by name: ``own``, the user's, and ``copy``, which stands for it in a shell.

    Both are taken to be in step when this is made.

    Args:
        left_out: names that each has for itself.
    """

    def __init__(
        self, own: dict[str, Any], copy: dict[str, Any], left_out: Set[str], sides: Sides
    ) -> None:
        self._own, self._copy = own, copy
        self._left_out = left_out
        self._sides = sides
        self._own_then, self._copy_then = own.copy(), copy.copy()

    def push(self) -> dict[str, Any]:
        """Brings the user's side up to date with the copy; returns what was set there."""
        return self._carry(self._copy, self._copy_then, self._own, self._own_then, self._sides.own)

    def pull(self) -> None:
        """Brings the copy up to date with the user's side."""
        self._carry(self._own, self._own_then, self._copy, self._copy_then, self._sides.copy)

    def lose(self, name: str, instead: Any) -> None:
        """The copy has ``instead`` from now on, which is not for the user's side."""
        self._copy[name] = self._copy_then[name] = instead

    def _carry(
        self,
        source: dict[str, Any],
        then: dict[str, Any],
        target: dict[str, Any],
        target_then: dict[str, Any],
        translate: Callable[[Any], Any],
    ) -> dict[str, Any]:
        if _is_same(source, then):
            return {}
        changed = {
            name: translate(value)
            for name, value in source.items()
            if value is not then.get(name, _NOTHING) and name not in self._left_out
        }
        # Modules and weights that are set leave the attributes, but each side has its own.
        elsewhere = {*source.get("_modules", ()), *source.get("_parameters", ())}
        removed = then.keys() - source.keys() - self._left_out - elsewhere
        then.clear()
        then.update(source)
        for held in (target, target_then):
            held.update(changed)
            for name in removed:
                held.pop(name, None)
        return changed


def _is_same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return now.keys() == then.keys() and all(map(operator.is_, now.values(), then.values()))
