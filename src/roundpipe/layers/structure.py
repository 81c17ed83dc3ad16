"""Which modules and parameters something is made of, walked once and compared in no time at every
call."""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn


class Snapshot:
    """What was in some dictionaries and containers when it was taken: values by identity, and their
    names.

    Compared for every call, or for every layer and stage run, so it looks at as little as possible.

    Args:
        chosen: dictionaries, each with the names to look at.
        whole: looked at as they are, dictionaries with all their names.
        sized: what is to have as many items as then.
    """

    def __init__(
        self,
        chosen: Iterable[tuple[dict[str, Any], Sequence[str]]],
        whole: Iterable[Collection[Any]] = (),
        sized: Iterable[Collection[Any]] = (),
    ) -> None:
        pairs = [(tuple(names), held) for held, names in chosen]
        getters = {names: _getter(names) for names, _ in pairs}
        self._getters = [getters[names] for names, _ in pairs]
        self._chosen = [held for _, held in pairs]
        others = list(whole)
        self._sized = [*sized, *others]
        self._filled = [part for held in others if held for part in _parts(held)]
        self.take()

    def take(self) -> None:
        sizes = list(map(len, self._sized))
        try:
            self._then = sizes, list(self._look())
        except (KeyError, RuntimeError):
            # A name has gone just now, or another thread is putting something in.
            self.forget()

    def forget(self) -> None:
        """Holds nothing of what it was taken of, and is not true until it is taken again."""
        self._then = [-1], []

    @property
    def is_true(self) -> bool:
        """Whether all is as it was."""
        sizes, then = self._then
        try:
            return list(map(len, self._sized)) == sizes and all(
                map(operator.is_, self._look(), then)
            )
        except (KeyError, RuntimeError):
            # A name is gone, or another thread is just putting something in.
            return False

    def _look(self) -> Iterator[Any]:
        """What there is: if sizes are as before, as many. One after the other, because making a
        list of it all takes as long as comparing it."""
        own = map(operator.call, self._getters, self._chosen)
        return chain(chain.from_iterable(own), chain.from_iterable(self._filled))


def _getter(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    # Because of a single one it makes no tuple.
    return operator.itemgetter(*(names if len(names) > 1 else names * 2))


def _parts(held: Collection[Any]) -> tuple[Collection[Any], ...]:
    return (held, held.values()) if isinstance(held, dict) else (held,)


def modules_of(root: nn.Module) -> Iterator[nn.Module]:
    """As ``root.modules()``, in another order, some of them more than once, and ten times as
    fast."""
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        waiting.extend(child for child in module._modules.values() if child is not None)


class Structure:
    """The modules and parameters of ``roots``, each once, as they are now."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules: list[nn.Module] = list(
            {id(m): m for root in roots for m in root.modules()}.values()
        )
        own = [list(module._parameters.values()) for module in self.modules]
        self.parameters: list[nn.Parameter] = list(
            {id(p): p for some in own for p in some if p is not None}.values()
        )
        self._parts = [
            (module, list(module._modules.values()), parameters)
            for module, parameters in zip(self.modules, own, strict=True)
        ]
        trees = [(module._modules, module._parameters) for module in self.modules]
        self._snapshot = Snapshot(
            ((module.__dict__, ("_modules", "_parameters")) for module in self.modules),
            (tree.values() for pair in trees for tree in pair),
        )
        self._kinds = [(parameter.dtype, parameter.shape) for parameter in self.parameters]

    def has_changed(self) -> bool:
        """Whether modules or parameters were added, removed or replaced since, or parameters cast
        or resized."""
        # What is not in the same dictionaries may be the same all the same.
        is_other = not self._snapshot.is_true and any(
            not (
                _are(module._modules.values(), children)
                and _are(module._parameters.values(), parameters)
            )
            for module, children, parameters in self._parts
        )
        return is_other or any(
            parameter.dtype != dtype or parameter.shape != shape
            for parameter, (dtype, shape) in zip(self.parameters, self._kinds, strict=True)
        )


def _are(now: Collection[object], then: Collection[object]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))
