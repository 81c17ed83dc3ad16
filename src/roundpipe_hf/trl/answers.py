"""Keeps what all processes have answered a loss, for the one that has to run it again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# In which accelerate's processes wait for each other.
_TALKING = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")


class Answers:
    """Used by the user's thread only.

    [Note: asked once] A loss that ran out of memory runs again in one process alone ([Note:
    again]), and the others are not there to answer it a second time: they wait for what it asks
    next. So it is given the answers that it has had, in the order of its questions, which are the
    same ones, and goes on asking where it had stopped.
    """

    def __init__(self) -> None:
        self._had: list[Any] = []
        self._next = 0
        self._is_asking = False

    def forget(self) -> None:
        """A window of losses begins that have asked nothing."""
        self._had, self._next = [], 0

    def give_again(self) -> None:
        """The losses since `forget` run once more, from the first one."""
        self._next = 0

    @contextmanager
    def kept(self, accelerator: Any) -> Iterator[None]:
        """Keeps what the ``accelerator`` is asked inside, by this thread."""
        for name in _TALKING:
            setattr(accelerator, name, self._keeping(getattr(accelerator, name)))
        try:
            yield
        finally:
            for name in _TALKING:
                delattr(accelerator, name)

    def _keeping(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if self._is_asking:  # one question of accelerate's is made of others
                return ask(*args, **kwargs)
            if self._next == len(self._had):
                self._is_asking = True
                try:
                    self._had.append(ask(*args, **kwargs))
                finally:
                    self._is_asking = False
            self._next += 1
            return self._had[self._next - 1]

        return keeping
