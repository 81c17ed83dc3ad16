"""Forks children that work, and kills them with SIGKILL at random times, or between two calls that
change what is on the disk. Only for processes without threads, which a fork would leave behind."""

import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from io import BufferedWriter
from types import FrameType, ModuleType
from typing import Any

# What a child does. It is given a function by which it tells where it is.
Work = Callable[[Callable[[], None]], object]
# Functions of Python's by which files and folders change, and locks are taken and given back.
_CHANGING = {"write", "sendfile", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "flock"}


def times_of(work: Work) -> list[float]:
    """Seconds from the first time that the child tells something: those at which it tells, and at
    which it has ended, which it does by itself."""
    child, pipe = start(work)
    told = _until(pipe, None)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"
    return [moment - told[0] for moment in told] + [time.perf_counter() - told[0]]


def kill(work: Work, seconds: float) -> tuple[bool, int]:
    """Kills the child so long after it has told something for the first time. Returns whether it
    was still at work, and how often it had told something."""
    child, pipe = start(work)
    os.set_blocking(pipe, True)
    told = len(os.read(pipe, 1))
    told += len(_until(pipe, seconds))
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    told += len(_until(pipe, None))
    os.close(pipe)
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed or status == 0, "the child failed"
    return was_killed, told


def kill_often(work: Work, longest: float, then: Callable[[int], object], count: int = 10) -> None:
    """Kills as many children, each within ``longest`` seconds. ``then`` looks at what each has left
    and is given how often it told something; those that ended by themselves do not count."""
    chance, killed, begun = random.Random(0), 0, 0
    while killed < count:
        assert begun < 5 * count, f"only {killed} of {begun} were killed: they end too soon"
        was_killed, told = kill(work, chance.uniform(0, longest))
        then(told)
        killed, begun = killed + was_killed, begun + 1
    print("killed:", killed, "of", begun)


def count_changes(work: Callable[[], object]) -> int:
    """Counts what a child that does the work changes on the disk, call by call."""

    def tells(tell: Callable[[], None]) -> None:
        with _Changes() as changes:
            work()
        for _ in range(changes.count):
            tell()

    return len(times_of(tells)) - 1


def kill_after(
    work: Callable[[], object], changes: Iterable[int], then: Callable[[int], object]
) -> None:
    """Kills a child after each of those changes, and calls ``then`` with its number."""
    for number in changes:
        child, pipe = start(lambda _, number=number: _work_until(work, number))
        os.close(pipe)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, number
        then(number)


def _work_until(work: Callable[[], object], change: int) -> None:
    with _Changes(change):
        work()


class _Changes:
    """Counts changes of the calling thread's, and kills the process after one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self._last = 0, last

    def __enter__(self) -> "_Changes":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, _: FrameType, event: str, called: Any) -> None:
        if event != "c_return" or called.__name__ not in _CHANGING:
            return
        if isinstance(called.__self__, ModuleType | BufferedWriter):  # and no text
            self.count += 1
            if self.count == self._last:
                os.kill(os.getpid(), signal.SIGKILL)


def start(work: Work) -> tuple[int, int]:
    """Returns the child, and the pipe by which it tells something."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work(lambda: os.write(writing, b"."))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # without the end of an interpreter that is not this one's
    os.close(writing)
    return child, reading


def _until(pipe: int, seconds: float | None) -> list[float]:
    """When each byte came, until then or to the pipe's end."""
    end = None if seconds is None else time.perf_counter() + seconds
    told: list[float] = []
    while True:
        left = None if end is None else max(0.0, end - time.perf_counter())
        ready, _, _ = select.select([pipe], [], [], left)
        if not ready:
            return told
        came = os.read(pipe, 1)
        if not came:
            return told
        told.append(time.perf_counter())
