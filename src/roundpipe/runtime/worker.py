"""A thread that runs jobs in order. Holds no reference to the engine that owns it, so that engine can be collected."""

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable

_log = logging.getLogger("roundpipe")
Job = Callable[[], None]
_here = threading.local()


def in_worker() -> bool:
    """Whether the calling thread is an engine's own: waiting for an engine there could wait for itself."""
    return getattr(_here, "is_worker", False)


_SECONDS_AT_EXIT = 10.0
_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread still inside torch when the interpreter goes away would abort the process. One that hangs must not
    keep it either."""
    workers = list(_alive)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(_SECONDS_AT_EXIT)


class Worker:
    """One named daemon thread. Jobs must not raise: they report their errors to whoever waits for them."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        _alive.add(self)

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "stopped"
        return f"<Worker {self._thread.name}: {state}, {self._jobs.qsize()} queued>"

    def submit(self, job: Job) -> None:
        """Returns at once; the job runs after all jobs submitted before."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread after the jobs already queued. Does not wait, so a finalizer may call it."""
        self._jobs.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end, at most ``timeout`` seconds. Called by ``close()`` and at exit only."""
        self._thread.join(timeout)


def _run(jobs: "queue.SimpleQueue[Job | None]") -> None:
    _here.is_worker = True
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            _log.exception("a job of %s raised; please report this", threading.current_thread().name)
        del job  # because a kept closure would keep the last call's tensors alive while the thread is idle
