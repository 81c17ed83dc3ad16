"""A thread that runs jobs in order. Holds no reference to the engine that owns it, so that engine
can be collected."""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable

_log = logging.getLogger("roundpipe")
Job = Callable[[], None]
_here = threading.local()


def in_worker() -> bool:
    """Whether the calling thread is an engine's own: waiting for an engine there could wait for
    itself."""
    return getattr(_here, "is_worker", False)


_SECONDS_AT_EXIT = 30.0
# Threads, also those whose `Worker` is gone with its engine while they have jobs left; None for
# whom a worker stops.
_threads: "dict[threading.Thread, queue.SimpleQueue[Job | None] | None]" = {}


@atexit.register
def _stop_all() -> None:
    """A thread still inside torch when the interpreter goes away would abort the process. One that
    hangs must not keep it either."""
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    for jobs in list(_threads.values()):
        if jobs is not None:
            jobs.put(None)
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _forget_ended() -> None:
    for thread in [thread for thread in list(_threads) if not thread.is_alive()]:
        _threads.pop(thread, None)


class Worker:
    """One named daemon thread. Jobs must not raise: they report their errors to whoever waits for
    them.

    ``helper``: another worker that this one's jobs give work to. It is this one's from here on, and
    ends after it.
    """

    def __init__(self, name: str, helper: "Worker | None" = None) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._helper = helper
        self._thread = threading.Thread(
            target=_run, args=(self._jobs, helper), name=name, daemon=True
        )
        self._thread.start()
        _forget_ended()
        _threads[self._thread] = self._jobs
        if helper is not None:
            # Because a helper that is stopped first would leave its worker waiting.
            _threads[helper._thread] = None

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "stopped"
        return f"<Worker {self._thread.name}: {state}, {self._jobs.qsize()} queued>"

    def submit(self, job: Job) -> None:
        """Returns at once; the job runs after all jobs submitted before."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread after the jobs already queued, then its helper. Never waits, so a
        finalizer may call it."""
        self._jobs.put(None)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end, at most ``timeout`` seconds. Called by ``close()`` and at
        exit only."""
        self._thread.join(timeout)
        if self._helper is not None:
            self._helper.join(timeout)


def _run(jobs: "queue.SimpleQueue[Job | None]", helper: Worker | None) -> None:
    _here.is_worker = True
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException:
            _log.exception(
                "a job of %s raised; please report this", threading.current_thread().name
            )
        # Because a kept closure would keep the last call's tensors alive while the thread is idle.
        del job
    if helper is not None:
        helper.stop()
