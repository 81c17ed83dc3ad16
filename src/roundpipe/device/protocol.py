"""What the engine asks of a device. Everything above is blind to the kind of device and is tested
on virtual ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch


class Event(Protocol):
    """A point on a lane."""

    def wait(self) -> None:
        """Blocks the calling thread until the lane has reached this point."""
        ...


class Mark(Protocol):
    """A moment on a lane, for measuring. Nobody can wait for it."""

    def seconds_since(self, earlier: Any) -> float | None:
        """From an earlier mark of the same lane to this; None while the lane has not come this far.
        Never blocks."""
        ...


class Lane(Protocol):
    """An ordered queue of work on one device. Lanes of one device run beside each other."""

    def copy_(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy. Neither tensor may be written or freed by others before a later event of
        this lane."""
        ...

    def record(self) -> Event:
        """An event reached once all work queued so far is done."""
        ...

    def mark(self) -> Mark:
        """The moment at which all work queued so far is done. Costs more than ``record``."""
        ...

    def wait(self, event: Event) -> None:
        """Later work on this lane starts only after ``event``, which may be another device's. Does
        not block."""
        ...

    def work(self) -> AbstractContextManager[None]:
        """Tensor operations issued inside by this thread are queued on this lane."""
        ...

    def borrow(self, tensor: torch.Tensor) -> None:
        """Keeps memory allocated on another lane from being reused before the work queued here is
        done."""
        ...


class MemoryInUse(NamedTuple):
    """Bytes of a device that tensors of this process take ``now``, and took at ``most`` so far."""

    now: int
    most: int


Work = Callable[[], None]


class Recorded(NamedTuple):
    """Work that can be queued again, as it was recorded. ``num_bytes``: of the device, which it
    keeps as long as this is there."""

    replays: tuple[Work, ...]
    num_bytes: int


class Device(Protocol):
    """A place that can hold a stage. Used by one worker thread at a time."""

    @property
    def name(self) -> str:
        """Shown in logs, traces and errors, and different for each device of an engine."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """The device that torch puts tensors on that are here."""
        ...

    @property
    def compute(self) -> Lane:
        """The lane that layers run on."""
        ...

    @property
    def up(self) -> Lane:
        """The lane of copies from the host: weights, inputs."""
        ...

    @property
    def down(self) -> Lane:
        """The lane of copies to the host: gradients, boundaries."""
        ...

    def new_lane(self) -> Lane:
        """One more lane, for copies that are to wait for no others."""
        ...

    def enter_thread(self) -> None:
        """Called once by a thread that will queue work on this device, before it queues any."""
        ...

    def limit_bytes(self, held: int = 0) -> int:
        """Bytes the engine may use on this device, the ``held`` ones that it has already among
        them."""
        ...

    def memory_in_use(self) -> MemoryInUse:
        """By tensors of the engine and of everybody else; zeros where nobody counts."""
        ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns True if ``tensor`` is on this device already, so that it needs no copy."""
        ...

    def rng_state(self) -> torch.Tensor:
        """State of the generator that random operations on this device draw from."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Goes back to a ``state`` that ``rng_state`` returned."""
        ...

    def rng_position(self) -> object:
        """Equal to an earlier one if nothing was drawn or set since. Cheaper than the state where
        that is possible."""
        ...

    def seed(self, seed: int) -> None:
        """Begins the generator anew, from ``seed``."""
        ...

    def shares_generator(self) -> bool:
        """Returns True if other devices and the caller's thread draw from the same generator."""
        ...

    def follow_caller(self) -> None:
        """Later work on all lanes starts after what the calling thread has queued on this device
        itself."""
        ...

    def lend_to_caller(self, tensor: torch.Tensor) -> None:
        """The calling thread will use ``tensor``, made on a lane, in its own stream order."""
        ...

    def capture(self, *works: Work) -> Recorded | None:
        """Records what ``works`` queue on the compute lane, inside of which this is called. They
        are to be done in this order, and the last before the first is done again.

        Returns None for work that cannot be recorded. What was recorded reads and writes the
        memory that it did then.
        """
        ...

    def trim(self) -> None:
        """Gives unused cached memory back to the system."""
        ...
