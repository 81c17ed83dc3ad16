"""What lists, dictionaries and the like hold, so that it can be had again after somebody has put
something else in.

Knows nothing of modules. Other objects are not looked into: they are what they are when somebody
reads them.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .structure import Snapshot

_KINDS = frozenset({list, tuple, dict, OrderedDict, defaultdict, Counter, set, deque})


def is_container(value: Any) -> bool:
    return type(value) in _KINDS


class Found(NamedTuple):
    """Containers, those inside of others too, each once. ``kinds``: the types of all that is in
    them."""

    containers: list[Any]
    kinds: set[type]

    def has(self, kind: type | tuple[type, ...]) -> bool:
        """Whether something of that kind is in one. Asks only types, because objects may do
        anything when asked."""
        return any(issubclass(own, kind) for own in self.kinds)


def with_inner(containers: Iterable[Any]) -> Found:
    found: dict[int, Any] = {}
    kinds: set[type] = set()
    left = list(containers)
    while left:
        value = left.pop()
        if is_container(value) and id(value) not in found:
            found[id(value)] = value
            held = items(value)
            own = set(map(type, held))
            kinds |= own
            if not _KINDS.isdisjoint(own):  # asked first, because most hold no others
                left.extend(held)
    return Found(list(found.values()), kinds)


def has_tensors(containers: Iterable[Any]) -> bool:
    return with_inner(containers).has(torch.Tensor)


class Contents:
    """What ``containers``, and those inside of them, held when it was made. Read by workers of all
    devices.

    Tuples that nothing can be put into at any level are left out.
    """

    def __init__(self, containers: Iterable[Any]) -> None:
        found = with_inner(containers)
        self.containers = [container for container in found.containers if not _is_fixed(container)]
        # Before the copies: what comes in between makes it untrue.
        self._snapshot = Snapshot((), self.containers)
        self.has_tensors = found.has(torch.Tensor)
        self._held = list(map(_copy, self.containers))

    @property
    def is_true(self) -> bool:
        """Whether they hold the same now."""
        return self._snapshot.is_true

    def copies(self) -> dict[int, Any]:
        """By the id of each container another one with what it held. What was in two places is in
        both again."""
        made = {
            id(container): _copy(held)
            for container, held in zip(self.containers, self._held, strict=True)
            if type(container) is not tuple
        }
        new = list(made.values())
        tuples = {
            id(container): container for container in self.containers if type(container) is tuple
        }

        def of(value: Any) -> Any:
            if id(value) in tuples and id(value) not in made:
                made[id(value)] = tuple(map(of, value))
            return made.get(id(value), value)

        for container in new:
            if not _KINDS.isdisjoint(map(type, items(container))):
                for key, item in list(_places(container)):
                    container[key] = of(item)
        for container in tuples.values():
            of(container)
        return made


def _is_fixed(container: Any) -> bool:
    if type(container) is not tuple:
        return False
    return _KINDS.isdisjoint(map(type, container)) or all(
        _is_fixed(item) for item in container if is_container(item)
    )


def _copy(container: Any) -> Any:
    return container if type(container) is tuple else container.copy()


def items(container: Any) -> list[Any]:
    """A list of its own, because another thread may be putting something in."""
    return list(container.values() if isinstance(container, dict) else container)


def _places(container: Any) -> Iterable[tuple[Any, Any]]:
    """What is where in a container that others can be put into. A set holds none that change."""
    if isinstance(container, (list, deque)):
        return enumerate(container)
    return container.items() if isinstance(container, dict) else ()
