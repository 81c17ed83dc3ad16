"""What failed behind the caller's back and has not reached him yet."""

from ..threads.interrupts import SteadyCondition


class LateError:
    """The first such error wins; it is for the next call that looks. On any thread."""

    def __init__(self, condition: SteadyCondition) -> None:
        self._condition = condition
        self._error: BaseException | None = None

    def keep(self, error: BaseException) -> None:
        with self._condition:
            if self._error is None:
                self._error = error
            self._condition.notify_all()

    def take(self) -> BaseException | None:
        """Whoever takes it raises it."""
        with self._condition:
            error, self._error = self._error, None
            return error

    def forget(self, error: BaseException) -> None:
        """The caller has it already."""
        with self._condition:
            if self._error is error:
                self._error = None
