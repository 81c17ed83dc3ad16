"""Code that modules hold and that has got hold of modules or parameters: the same code, with others
in their place.

A patched forward, a lambda made in ``__init__``, a hook: as methods, partials or closures they
refer to the user's own modules, whose weights are on the host and of no use to a stage run. Knows
nothing of what is put in their place.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

Replace = Callable[[Any], Any]
CODE = (types.FunctionType, types.MethodType, functools.partial)


def rebound(code: Any, replace: Replace) -> Any:
    """``code`` with ``replace(value)`` for every value it is bound to; itself where that changes
    nothing."""
    return _Rebinding(replace).of(code)


def mentioned(code: Any) -> list[Any]:
    """Everything that ``code`` is bound to."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    rebound(code, note)
    return found


def is_bound_for_good(code: Any) -> bool:
    """Whether it stays bound to what it is: cells and defaults can be set anew, a method's owner
    cannot."""
    if isinstance(code, types.FunctionType):
        return not (code.__closure__ or code.__defaults__ or code.__kwdefaults__)
    return isinstance(code, types.MethodType)


def is_rebound(value: Any) -> bool:
    """Whether it was made here, and so is nobody's own."""
    return isinstance(value, CODE) and getattr(value, "_is_rebound", False)


class _Rebinding:
    def __init__(self, replace: Replace) -> None:
        self._replace = replace
        self._seen: set[int] = set()  # because closures may refer to themselves

    def of(self, value: Any) -> Any:
        if not isinstance(value, CODE):
            return self._replace(value)
        if id(value) in self._seen:
            return value
        self._seen.add(id(value))
        if isinstance(value, types.MethodType):
            owner = self._replace(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        return (
            self._partial(value) if isinstance(value, functools.partial) else self._function(value)
        )

    def _partial(self, code: "functools.partial[Any]") -> Any:
        before = [code.func, *code.args, *code.keywords.values()]
        after = [self.of(value) for value in before]
        if all(one is other for one, other in zip(before, after, strict=True)):
            return code
        first, positional = after[0], after[1 : 1 + len(code.args)]
        keywords = dict(zip(code.keywords, after[1 + len(code.args) :], strict=True))
        made = functools.partial(first, *positional, **keywords)
        made.__dict__.update(code.__dict__, _is_rebound=True)
        return made

    def _function(self, code: types.FunctionType) -> Any:
        cells, defaults, named = (
            code.__closure__ or (),
            code.__defaults__ or (),
            code.__kwdefaults__ or {},
        )
        before = [*cells, *defaults, *named.values()]
        after = [*map(self._cell, cells), *map(self.of, defaults), *map(self.of, named.values())]
        if all(one is other for one, other in zip(before, after, strict=True)):
            return code
        cells, others = tuple(after[: len(cells)]), after[len(cells) :]
        made = types.FunctionType(
            code.__code__,
            code.__globals__,
            code.__name__,
            tuple(others[: len(defaults)]) or None,
            cells or None,
        )
        made.__kwdefaults__ = dict(zip(named, others[len(defaults) :], strict=True)) or None
        made.__dict__.update(code.__dict__, _is_rebound=True)
        return made

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            before = cell.cell_contents
        except ValueError:  # nothing was assigned yet
            return cell
        after = self.of(before)
        return cell if after is before else types.CellType(after)
