"""What lists, dictionaries and the like hold, so that it can be had again after somebody has put something else in.

Knows nothing of modules. Other objects are not looked into: they are what they are when somebody reads them.
"""

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from .structure import Snapshot

_KINDS = frozenset({list, tuple, dict, set, deque})


def is_container(value: Any) -> bool:
    return type(value) in _KINDS


def has_tensors(containers: Iterable[Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for container in _with_inner(containers) for item in _items(container))


class Contents:
    """What ``containers``, and those inside of them, held when it was made. Read by workers of all devices."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self.containers = _with_inner(containers)
        self._snapshot = Snapshot((), self.containers)  # before the copies: what comes in between makes it untrue
        self.has_tensors = has_tensors(self.containers)
        self._held = [copy.copy(container) for container in self.containers]

    @property
    def is_true(self) -> bool:
        """Whether they hold the same now."""
        return self._snapshot.is_true

    def copies(self) -> dict[int, Any]:
        """By the id of each container another one with what it held. What was in two places is in both again."""
        held = dict(zip(map(id, self.containers), self._held, strict=True))
        made: dict[int, Any] = {}

        def of(value: Any) -> Any:
            if not is_container(value) or id(value) not in held:
                return value
            if id(value) not in made:
                made[id(value)] = new = copy.copy(held[id(value)])  # before what is in it, which may be itself
                if isinstance(new, tuple):
                    made[id(value)] = tuple(map(of, new))
                for key, item in list(_places(new)):
                    new[key] = of(item)
            return made[id(value)]

        for container in self.containers:
            of(container)
        return made


def _with_inner(containers: Iterable[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    left = list(containers)
    while left:
        container = left.pop()
        if is_container(container) and id(container) not in found:
            found[id(container)] = container
            left.extend(_items(container))
    return list(found.values())


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _places(container: Any) -> Iterable[tuple[Any, Any]]:
    """What is where in a container that others can be put into. A set holds none that change."""
    if isinstance(container, (list, deque)):
        return enumerate(container)
    return container.items() if isinstance(container, dict) else ()
