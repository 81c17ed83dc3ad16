"""Engines over the same weights, of which the caller uses one at a time. Knows who has which, and
writes none.

[Note: turns] Who wraps a model again, or a part of it, has two engines with masters of their own
for a weight, and the first may have an update under way, or one that is not written back because it
was asynchronous. So an engine that is made or called has the others *give way* first: they end
their jobs and write back, and have nothing left to write later. What they have stepped or loaded
since its own last call it then *follows*: its masters take over the model's weights, and what
devices hold of those is sent again. An engine that is forgotten writes back in its last job,
because nobody can ask it to any more. What keeps an engine from writing back stops the others too:
they would go on from weights of which some are older than others. That ends when it is closed; then
what the model holds is what there is.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ..threads.weak_registry import WeakRegistry
from . import context

if TYPE_CHECKING:
    from .thread import StepThread


class Turns:
    """Of one engine, whose step thread is ``own``. Used by the caller's thread.

    Args:
        weights: ids of parameters, which ``own`` keeps alive.
    """

    def __init__(self, own: "StepThread", weights: Collection[int]) -> None:
        self.weights = frozenset(weights)
        self._is_behind = False
        self._others: WeakRegistry[StepThread] = WeakRegistry()
        for other in _over(self.weights):
            self._others.add(other)
            other.turns._others.add(own)

    def take(self, follow: Callable[[], None]) -> None:
        """Before an engine call. ``follow``: takes over what others have changed since this
        engine's last one."""
        for other in self._others:
            other.give_way()
        if self._is_behind:
            follow()
            self._is_behind = False  # only now, because an interrupt may have come before

    def tell_others(self) -> None:
        """This engine changes weights."""
        for other in self._others:
            other.turns._is_behind = True


def make_way(parameters: Iterable[torch.Tensor]) -> None:
    """Before an engine is made over the parameters: what others have yet to write there is
    written."""
    for other in _over({id(parameter) for parameter in parameters}):
        context.refuse_inside("wrapping a model that has an engine")
        other.give_way()


def _over(weights: Collection[int]) -> "list[StepThread]":
    return [thread for thread in context.threads() if not thread.turns.weights.isdisjoint(weights)]
