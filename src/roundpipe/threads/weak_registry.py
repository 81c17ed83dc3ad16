"""What is to be found for as long as it lives. Knows nothing of what it holds."""

import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Holds nothing alive. Any thread adds and looks, in the order in which things were added.

    Not a WeakSet: looking through one raises RuntimeError if another thread adds to it meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # because two that add at once would lose one
        # Never written, so that whoever looks needs no lock.
        self._references: tuple[weakref.ref[T], ...] = ()

    def __iter__(self) -> Iterator[T]:
        for reference in self._references:
            item = reference()
            if item is not None:
                yield item

    def add(self, item: T) -> None:
        with self._lock:
            alive = tuple(reference for reference in self._references if reference() is not None)
            self._references = (*alive, weakref.ref(item))

    def clear(self) -> None:
        """While nobody adds, or in a forked process, where a thread that was adding is not there to
        go on."""
        self._lock = threading.Lock()
        self._references = ()
