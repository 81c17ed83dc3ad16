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

import logging
import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from ..threads.weak_registry import WeakRegistry
from . import context

if TYPE_CHECKING:
    from .thread import StepThread

_log = logging.getLogger("roundpipe")


class Turns:
    """Of one engine, whose step thread is ``own``. Used by the caller's thread.

    Args:
        weights: ids of parameters, which ``own`` keeps alive.
    """

    def __init__(self, own: "StepThread", weights: Collection[int]) -> None:
        self.weights = frozenset(weights)
        self._own = weakref.proxy(own)
        self._is_behind = False
        self._is_over = False
        self._others: WeakRegistry[StepThread] = WeakRegistry()
        for other in _over(self.weights):
            self._others.add(other)
            other.turns._others.add(own)

    def take(self) -> None:
        """Before an engine call: goes on from what the others have made of the weights since this
        engine's last one."""
        for other in self._others:
            other.turns.give_way()
        if self._is_behind:
            self._own.follow_others()
            self._is_behind = False  # only now, because an interrupt may have come before

    def tell_others(self) -> None:
        """This engine changes weights."""
        for other in self._others:
            other.turns._is_behind = True

    def give_way(self) -> None:
        """Another engine is to be used: what is under way ends, and the user's parameters hold the
        newest weights.

        Raises what failed behind the caller's back. After ``close()``, which has raised what kept
        it from writing back, it is tried once more.
        """
        if self._is_over:
            return
        own = self._own
        own.wait_idle()
        try:
            own.bring_home()
            own.raise_kept()
        except Exception as error:
            if own.is_closed:
                # Because later it might overwrite what others have made of the weights.
                self._is_over = True
                _log.warning(
                    "%s was closed before its weights were written back: the model is without some",
                    own.name,
                )
                return
            error.add_note(
                f"RoundPipe: this comes from the engine {own.name}, which has the same weights"
            )
            if own.has_failed_to_write_back(error):
                error.add_note(
                    "RoundPipe: the model may hold some of its weights after the last update and "
                    "some before; if it goes on like this, close() that engine, and load weights "
                    "through another one"
                )
            raise


def make_way(parameters: Iterable[torch.Tensor]) -> None:
    """Before an engine is made over the parameters: what others have yet to write there is
    written."""
    for other in _over({id(parameter) for parameter in parameters}):
        context.refuse_inside("wrapping a model that has an engine")
        other.turns.give_way()


def _over(weights: Collection[int]) -> "list[StepThread]":
    return [thread for thread in context.threads() if not thread.turns.weights.isdisjoint(weights)]
