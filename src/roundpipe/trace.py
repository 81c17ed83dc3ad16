"""Spans: what ran where and when, for profilers and drawings. Free when nobody listens."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """One finished span. Times are ``time.perf_counter`` seconds; ``thread`` is the worker's name."""

    name: str
    thread: str
    start: float
    end: float
    fields: dict[str, Any]


_listeners: list[Callable[[Span], None]] = []


@contextmanager
def span(name: str, **fields: Any) -> Iterator[None]:
    """Times a block for the listeners and labels it in a running torch profiler."""
    if not _listeners and not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    start = time.perf_counter()
    with torch.profiler.record_function(f"roundpipe::{name} {fields}"):
        yield
    finished = Span(name, threading.current_thread().name, start, time.perf_counter(), fields)
    for listener in tuple(_listeners):
        listener(finished)


@contextmanager
def listen(listener: Callable[[Span], None]) -> Iterator[None]:
    """Calls ``listener`` with every span that ends inside the block, on the thread that ran it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
