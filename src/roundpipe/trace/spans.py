"""Spans: what ran where and when, for profilers and drawings. Free when nobody listens."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch

_log = logging.getLogger("roundpipe")


class Lane(Protocol):
    """What a span needs of a lane of a device to tell when work queued inside the block really
    ran."""

    def record(self) -> Any: ...

    def mark(self) -> Any: ...


class LaneTimes(NamedTuple):
    """When a lane passed the beginning and the end of a block. ``origin`` is a mark and the host's
    time at it; None where nobody had asked for that."""

    begin: Any
    end: Any
    origin: tuple[Any, float] | None

    def seconds(self) -> tuple[float, float] | None:
        """On the scale of ``time.perf_counter``; None while the lane has not come that far."""
        if self.origin is None:
            return None
        mark, at = self.origin
        times = [moment.seconds_since(mark) for moment in (self.begin, self.end)]
        return None if None in times else (at + times[0], at + times[1])

    def duration(self) -> float | None:
        """Seconds; None while the lane has not come that far."""
        taken: float | None = self.end.seconds_since(self.begin)
        return taken


class Span(NamedTuple):
    """One finished span. Times are ``time.perf_counter`` seconds; ``thread`` is the worker's
    name."""

    name: str
    thread: str
    start: float
    end: float
    fields: dict[str, Any]
    on_lane: LaneTimes | None = None


Listener = Callable[[Span], None]
_listeners: list[Listener] = []
_placing: list[Listener] = []  # those of them that want to know when lanes passed, not how long
_origins: "WeakKeyDictionary[Lane, tuple[Any, float]]" = WeakKeyDictionary()


@contextmanager
def span(name: str, *, lane: Lane | None = None, **fields: Any) -> Iterator[None]:
    """Times a block for the listeners and labels it in a running torch profiler.

    ``lane``: where the block queues work, which is then timed there as well.
    """
    if not _listeners and not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    origin = _origin_of(lane) if lane is not None and _placing else None
    start = time.perf_counter()
    begin = lane.mark() if lane is not None and _listeners else None
    with torch.profiler.record_function(f"roundpipe::{name} {fields}"):
        yield
    on_lane = (
        LaneTimes(begin, lane.mark(), origin) if lane is not None and begin is not None else None
    )
    _tell(Span(name, threading.current_thread().name, start, time.perf_counter(), fields, on_lane))


def _origin_of(lane: Lane) -> tuple[Any, float]:
    if lane not in _origins:
        lane.record().wait()  # because only of an idle lane is it known when it passes a mark
        _origins[lane] = lane.mark(), time.perf_counter()
    return _origins[lane]


def _tell(finished: Span) -> None:
    for listener in tuple(_listeners):
        try:
            listener(finished)
        except Exception:
            _log.exception("a listener of spans raised and is dropped; what it listened to goes on")
            _forget(listener)


def _forget(listener: Listener) -> None:
    for them in (_listeners, _placing):
        if listener in them:
            them.remove(listener)


@contextmanager
def listen(listener: Listener, *, places: bool = True) -> Iterator[None]:
    """Calls ``listener`` with every span that ends inside the block, on the thread that ran it.

    ``places``: whether it asks when lanes passed; for that each lane is once waited for. How long
    they took is known without.
    """
    _listeners.append(listener)
    if places:
        _placing.append(listener)
    try:
        yield
    finally:
        _forget(listener)
