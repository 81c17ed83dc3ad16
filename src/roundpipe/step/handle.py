"""What the caller of ``step`` holds: an update under way."""

import threading
from collections.abc import Callable
from typing import Any


class StepHandle:
    """An update under way, as `RoundPipe.step` returns it. Any thread may wait for it.

    Args:
        condition: notified whenever something ends.
        on_raise: told of the error that a caller has seen here.

    Example:
        >>> handle = engine.step(update)  # returns at once
        >>> loss = engine.forward_backward((x,), label=y, loss_fn=loss_fn)
        >>> norm = handle.result()  # what update() returned
    """

    def __init__(
        self, condition: threading.Condition, on_raise: Callable[[BaseException], None]
    ) -> None:
        self._condition = condition
        self._on_raise = on_raise
        self._is_done = False
        self._is_entered = False
        self._result: Any = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "pending" if not self._is_done else "failed" if self._error is not None else "done"
        return f"<StepHandle: {state}>"

    def wait(self) -> None:
        """Blocks until the masters are updated, and raises what ``step_fn`` raised.

        An interrupt is raised only after the update, so that it is never half applied.
        """
        self._wait(lambda: self._is_done)
        if self._error is not None:
            # Because what the caller has seen here is not to come up again later.
            self._on_raise(self._error)
            raise self._error

    def wait_over(self) -> bool:
        """Blocks until the update succeeded or failed. Returns whether it succeeded; its error is
        left to ``wait``."""
        self._wait(lambda: self._is_done)
        return self._error is None

    def result(self) -> Any:
        """Waits, then returns what ``step_fn`` returned."""
        self.wait()
        return self._result

    def wait_entered(self) -> None:
        """Blocks until an optimizer's ``step`` has begun, or the job is over."""
        self._wait(lambda: self._is_entered or self._is_done)

    def _wait(self, is_true: Callable[[], bool]) -> None:
        # The condition puts an interrupt off until the wait is over; a second one is raised at
        # once.
        with self._condition:
            self._condition.wait_for(is_true)

    def _enter(self) -> None:
        with self._condition:
            self._is_entered = True
            self._condition.notify_all()

    def _finish(self, result: Any, error: BaseException | None) -> None:
        with self._condition:
            self._is_done, self._result, self._error = True, result, error
            self._condition.notify_all()
