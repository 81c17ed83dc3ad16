"""Ctrl-C at a moment that suits, so that an engine call counts whole or not at all.

Python raises KeyboardInterrupt in the main thread between any two calls of functions: also between
the last wait of a call and the line that commits it, and where a condition is about to be released.
In a block nothing is raised: whoever is in it is told, and the exception is raised when the
outermost block ends. A second Ctrl-C is raised at once, for whoever does not want to wait for a
layer that hangs.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Of one block. ``error``: what the first one is going to raise; None while there was none."""

    def __init__(self, tell: Callable[[BaseException], None] | None) -> None:
        self._tell = tell
        self.error: BaseException | None = None

    def keep(self) -> None:
        """From now on nobody is told: what comes counts as coming after the block."""
        self._tell = None

    def note(self, error: BaseException) -> None:
        self.error = error
        if self._tell is not None:
            self._tell(error)


class _Handler:
    """Takes the place of the SIGINT handler while the main thread is in a block. Used by that
    thread only."""

    def __init__(self) -> None:
        self._blocks: list[Interrupts] = []
        self._previous: Any = None

    def enter(self, block: Interrupts) -> None:
        self._blocks.append(block)
        previous: Any = signal.getsignal(signal.SIGINT)
        if previous is not self and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self)

    def leave(self, block: Interrupts, propagating: BaseException | None) -> None:
        """Raises what the block has put off, if it was the outermost; not what is on its way up
        already."""
        if block in self._blocks:
            self._blocks.remove(block)
        if self._blocks:
            return
        current: Any = signal.getsignal(signal.SIGINT)
        if current is self:
            signal.signal(signal.SIGINT, self._previous)
        if block.error is not None and propagating is not block.error:
            raise block.error

    def __call__(self, number: int, frame: Any) -> None:
        if not self._blocks or any(block.error is not None for block in self._blocks):
            self._previous(number, frame)
            return
        try:
            # The user's handler, which need not raise at all.
            self._previous(number, frame)
        except BaseException as error:
            for block in self._blocks:
                block.note(error)


_handler = _Handler()


def _can_be_interrupted() -> bool:
    """Signals come to the main thread only."""
    return threading.get_ident() == threading.main_thread().ident


@contextmanager
def deferred(tell: Callable[[BaseException], None] | None = None) -> Iterator[Interrupts]:
    """Interrupts that come in the block are raised at its end; of nested blocks each is told, and
    the outermost raises.

    Args:
        tell: called in the main thread, between any two instructions of it; must not block.
    """
    block = Interrupts(tell)
    if not _can_be_interrupted():
        yield block
        return
    try:
        _handler.enter(block)
        yield block
    finally:
        _handler.leave(block, sys.exc_info()[1])


class SteadyCondition(threading.Condition):
    """A condition that an interrupt can neither leave locked nor unlock: while it is held,
    ``deferred`` holds."""

    def __init__(self) -> None:
        super().__init__(threading.RLock())
        self._held: list[Interrupts] = []  # by the main thread

    def __enter__(self) -> bool:
        if not _can_be_interrupted():
            return super().__enter__()
        block = Interrupts(None)
        try:
            _handler.enter(block)
            self._held.append(block)
            return super().__enter__()
        except BaseException as error:
            if block in self._held:
                self._held.remove(block)
            _handler.leave(block, error)
            raise

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if _can_be_interrupted():
            _handler.leave(self._held.pop(), error[1])

    def wait_interruptibly(self, is_true: Callable[[], bool]) -> None:
        """Waits until ``is_true``, or raises the interrupt that comes first. To be called without
        holding it."""
        with deferred(self._wake) as interrupts, self:
            self.wait_for(lambda: interrupts.error is not None or is_true())

    def _wake(self, _: BaseException) -> None:
        with self:
            self.notify_all()
