"""Where the threads of an engine wait for each other. One condition, so that a failure wakes every
wait."""

import threading
from collections.abc import Callable
from typing import Any


class Cancelled(BaseException):
    """Another part of the same call failed first; this part only has to stop. Never reaches the
    user."""


class Mailbox:
    """Values one call's workers post for each other, and the first error among them.

    All boards of an engine share its condition: whoever changes what another thread may wait for
    notifies it.
    """

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition
        self._posted: dict[Any, Any] = {}
        self.error: BaseException | None = None

    def post(self, key: Any, value: Any) -> None:
        with self._condition:
            self._posted[key] = value
            self._condition.notify_all()

    def take(self, key: Any) -> Any:
        """Waits for ``key`` and removes it. Raises Cancelled once the call has failed."""
        self.wait_until(lambda: key in self._posted)
        with self._condition:
            return self._posted.pop(key)

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Waits for a state that some thread announces on the engine's condition. Raises Cancelled
        on failure."""
        with self._condition:
            self._condition.wait_for(lambda: self.error is not None or is_true())
            if self.error is not None:
                raise Cancelled

    def is_so(self, is_true: Callable[[], bool]) -> bool:
        """Whether it is true now of a state that is announced on the engine's condition."""
        with self._condition:
            return is_true()

    def check(self) -> None:
        if self.error is not None:
            raise Cancelled

    def fail(self, error: BaseException) -> None:
        """The first error wins; every wait of this call ends."""
        with self._condition:
            if self.error is None:
                self.error = error
            self._condition.notify_all()

    def clear(self) -> None:
        with self._condition:
            self._posted.clear()
