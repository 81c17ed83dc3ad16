"""The jobs of an optimizer thread, of which the caller knows how many are left, and what failed
behind his back and has not reached him yet."""

from collections.abc import Callable

from ..threads.interrupts import SteadyCondition, deferred
from ..threads.worker import Worker


class Jobs:
    """Queued by the caller, done by ``worker`` in that order. ``fail`` is told, there and under the
    condition, what a job raises."""

    def __init__(
        self, worker: Worker, condition: SteadyCondition, fail: Callable[[BaseException], None]
    ) -> None:
        self._worker = worker
        self._condition = condition
        self._fail = fail
        self.num_left = 0

    def submit(self, job: Callable[[], None]) -> None:
        def counted() -> None:
            failure: BaseException | None = None
            try:
                job()
            except BaseException as error:
                # Because an error that ended this thread would leave its waiters waiting.
                failure = error
            with self._condition:
                if failure is not None:
                    self._fail(failure)
                self.num_left -= 1
                self._condition.notify_all()

        with deferred():
            with self._condition:
                self.num_left += 1
            self._worker.submit(counted)

    def wait_idle(self) -> None:
        """Blocks until all are done."""
        self._condition.wait_interruptibly(lambda: self.num_left == 0)

    def submit_last(self, job: Callable[[], None]) -> None:
        """Never waits, and nobody waits for it."""
        self._worker.submit(job)


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
