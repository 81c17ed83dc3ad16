"""The adversarial device's lanes, on which copies happen late. See [Note: the adversary] in
`adversarial.py`."""

import itertools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..device.capacity import tensors_in
from ..device.virtual import Moment, innermost
from .copies import Copy
from .ordering import Access, Known, Memory, Ticks, ledger, poison

if TYPE_CHECKING:
    from .adversarial import AdversarialDevice

# One for all devices, because waiting for an event of one may run copies of another. Nobody blocks
# while holding it.
_lock = threading.RLock()
_lane_numbers = itertools.count()
# On any lane that still exists: what a device that is gone has left in its queues will never be
# done.
_unfinished: "weakref.WeakSet[Copy]" = weakref.WeakSet()
_over: Ticks = {}  # what some thread has waited for: whatever is queued now comes after it


class _Here(threading.local):
    """What the calling thread is doing on adversarial lanes."""

    def __init__(self) -> None:
        self.lanes: list[AdversarialLane] = []  # whose ``work`` it is in, the innermost last
        self.is_copying = False  # its operations are the adversary's own, also inside ``work``


_here = _Here()


@contextmanager
def _own_operations() -> Iterator[None]:
    """Holds the lock and keeps what is done inside from being taken for work on a lane."""
    with _lock:
        before, _here.is_copying = _here.is_copying, True
        try:
            yield
        finally:
            _here.is_copying = before


class AdversarialEvent:
    """A point on a lane. Waiting for it is what makes the copies before it happen."""

    def __init__(self, lane: "AdversarialLane", position: int, known: Ticks) -> None:
        self.lane = lane
        self.position = position
        self.known = known

    @property
    def is_reached(self) -> bool:
        return self.lane.num_done >= self.position

    def wait(self) -> None:
        with _own_operations():
            _advance(self.lane, self.position)
            _learn(_over, self.known)


class AdversarialLane:
    """An ordered queue of copies and waits. Other work on it runs at once, after everything queued
    before it.

    Used by any thread.
    """

    def __init__(self, device: "AdversarialDevice", kind: str, draws: random.Random) -> None:
        self._device = device
        self.kind = kind
        self.draws = draws
        self.number = next(_lane_numbers)
        self.num_done = 0
        self._queue: deque[Copy | AdversarialEvent] = deque()
        self._known: Ticks = {}
        self._tick = 0

    def __repr__(self) -> str:
        return f"<{self._device.name} {self.kind}: {self.num_done} done, {len(self._queue)} queued>"

    @property
    def device(self) -> "AdversarialDevice":
        return self._device

    def copy_(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._give_way()
        with _own_operations():
            self._queue_copy(target, source)

    def record(self) -> AdversarialEvent:
        self._give_way()
        with _lock:
            event = AdversarialEvent(
                self, self.num_done + len(self._queue), {**self._known, self.number: self._tick}
            )
            self._tick += 1
            return event

    def mark(self) -> Moment:
        return Moment()

    def wait(self, event: object) -> None:
        self._give_way()
        if not isinstance(event, AdversarialEvent):
            return
        with _lock:
            _learn(self._known, event.known)
            if event.lane is not self and not event.is_reached:
                self._queue.append(event)

    def work(self) -> AbstractContextManager[None]:
        return innermost(_here.lanes, self, _Interception)

    def borrow(self, tensor: torch.Tensor) -> None:
        with _lock:
            ledger.of(tensor).borrowed_by.add(self.number)

    def finish(self) -> None:
        """Does everything queued."""
        with _own_operations():
            _advance(self, self.num_done + len(self._queue))

    def report(self, fault: str) -> None:
        self._device.faults.append(f"{self.kind} lane of {self._device.name}, {fault}")

    # Called under the lock.

    @property
    def is_ready(self) -> bool:
        """Whether the first thing queued is a copy, or a wait that is over."""
        return not isinstance(first := self._queue[0], AdversarialEvent) or first.is_reached

    def next_waits(self, position: int) -> list[AdversarialEvent]:
        """What the next copy before a position waits for: several may come in either order."""
        events = []
        for item in itertools.islice(self._queue, max(position - self.num_done, 0)):
            if not isinstance(item, AdversarialEvent):
                break
            events.append(item)
        return events

    def finish_first(self) -> None:
        """Does the first thing queued, which waits for nothing any more."""
        if isinstance(first := self._queue[0], Copy):
            first.finish()
            _unfinished.discard(first)
        self._queue.popleft()
        self.num_done += 1

    def _known_now(self) -> Known:
        return {self.number: self._tick}, self._known, _over

    def _queue_copy(
        self, target: torch.Tensor, source: torch.Tensor, senders: "Sequence[AdversarialLane]" = ()
    ) -> None:
        fault, known = None, self._known_now()
        written, read = ledger.of(target), ledger.of(source)
        if not read.reaches(known):
            fault = "it does not wait for the lane that wrote its source"
        elif not written.is_left(known):
            fault = "it does not wait for a lane that used its target"
        copy = Copy([self, *senders], target, source, fault)
        if fault is not None:
            poison(target)
        elif not any(copy.follows(earlier) for earlier in _unfinished):
            copy.begin()
        self._queue.append(copy)
        _unfinished.add(copy)
        self._note_read(read)
        self._note_written(written)

    def intercept(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carries out one tensor operation of this thread, or queues it if it is a copy on a copy
        lane."""
        name = operation._schema.name
        if operation.is_view:
            return operation(*args, **kwargs)
        with _lock:
            if self.kind != "compute" and name == "aten::_to_copy":
                return self._queue_new(operation, args, kwargs)
            if self.kind != "compute" and name == "aten::copy_":
                self._queue_copy(args[0], args[1])
                return args[0]
            if not name.startswith("aten::empty"):
                _advance(self, self.num_done + len(self._queue))
        result = operation(*args, **kwargs)
        self._device.count(operation, args, kwargs, result)
        with _lock:
            if name.startswith("aten::empty"):
                poison(result)
            written = operation._schema.arguments
            for position, value in [*enumerate(args), *kwargs.items()]:
                is_written = (
                    isinstance(position, int)
                    and (info := written[position].alias_info)
                    and info.is_write
                )
                for tensor in tensors_in(value):
                    (self._note_written if is_written else self._note_read)(ledger.of(tensor))
            for tensor in tensors_in(result):
                self._note_made(ledger.of(tensor))
        return result

    def _queue_new(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """A tensor comes to this device: from the host or, in step with a lane of that device, from
        another."""
        source: torch.Tensor = args[0]
        target: torch.Tensor = operation(*args, **kwargs)
        self._device.count(operation, args, kwargs, target)
        self._note_made(ledger.of(target))
        senders = [lane for lane in _here.lanes if lane._device is not self._device][-1:]
        for lane in senders:
            self.wait(lane.record())
        self._queue_copy(target, source, senders)
        for lane in senders:
            lane.wait(self.record())
        return target

    def _note_made(self, memory: Memory) -> None:
        if memory.written is None and not memory.read:
            memory.home, memory.made_by = self._device, self.number
        self._note_written(memory)

    def _note_written(self, memory: Memory) -> None:
        memory.written = Access(self.number, self._tick)
        memory.read.clear()

    def _note_read(self, memory: Memory) -> None:
        memory.read[self.number] = self._tick

    def _give_way(self) -> None:
        if self.draws.random() < 0.25:
            time.sleep(0)  # lets another thread run, waits for nothing


class _Interception(TorchDispatchMode):
    """Shows the innermost lane every operation of the thread that is in ``work``; passed over while
    it runs one."""

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _here.is_copying:
            return operation(*args, **(kwargs or {}))
        return _here.lanes[-1].intercept(operation, args, kwargs or {})


def home_of(tensor: torch.Tensor) -> "AdversarialDevice | None":
    """The device on which ``tensor`` was made or to which it was brought; None for the host."""
    with _lock:
        home: AdversarialDevice | None = ledger.of(tensor).home
        return home


def hand_to_caller(tensor: torch.Tensor) -> bool:
    """``tensor`` is the host's from now on. Returns False, and its values are gone, if the calling
    thread has not waited for whatever wrote it."""
    with _own_operations():
        memory = ledger.of(tensor)
        memory.home = None
        has_waited = memory.reaches((_over,))
        if not has_waited:
            poison(tensor)
        return has_waited


def _advance(lane: AdversarialLane, position: int) -> None:
    """Runs the lane up to a position, and of other lanes what it waits for. The order is drawn
    where it is free."""
    wanted = {lane: position}
    while unfinished := [behind for behind, target in wanted.items() if behind.num_done < target]:
        chosen = lane.draws.choice(unfinished)
        if chosen.is_ready:
            chosen.finish_first()
        for event in chosen.next_waits(wanted[chosen]):
            wanted[event.lane] = max(wanted.get(event.lane, 0), event.position)


def _learn(known: Ticks, more: Ticks) -> None:
    for lane, tick in more.items():
        known[lane] = max(known.get(lane, -1), tick)
