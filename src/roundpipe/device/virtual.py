"""A device made of the CPU: it copies what an accelerator would copy, so the same mistakes show. No
own threads."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .capacity import VirtualMemory
from .generators import state_of
from .protocol import Lane, MemoryInUse, Recorded, Work

_CPU = torch.device("cpu")


class Reached:
    """The event of work that is done when the call that queued it returns, as on a virtual
    device."""

    def wait(self) -> None:
        return


class Moment:
    """A moment of the calling thread, in which work on a virtual device runs."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def seconds_since(self, earlier: "Moment") -> float:
        return self._at - earlier._at


class _Here(threading.local):
    """The devices with a size whose ``work`` the calling thread is in, the innermost last."""

    def __init__(self) -> None:
        self.capacities: list[VirtualMemory] = []


_here = _Here()


class _Counting(TorchDispatchMode):
    """Shows every operation of the thread to the device that it is done on."""

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = operation(*args, **kwargs)
        _here.capacities[-1].count(operation, (*args, *kwargs.values()), made)
        return made


@contextmanager
def innermost(
    entered: list[Any], one: Any, watch: Callable[[], TorchDispatchMode]
) -> Iterator[None]:
    """Inside, ``one`` is the last of those ``entered``, the first of which has the thread's
    operations watched."""
    entered.append(one)
    try:
        with watch() if len(entered) == 1 else nullcontext():
            yield
    finally:
        entered.pop()


class VirtualLane:
    """Runs everything at once, in the calling thread. ``capacity``: of its device, if that has a
    size."""

    def __init__(self, capacity: VirtualMemory | None = None) -> None:
        self._capacity = capacity

    def copy_(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def record(self) -> Reached:
        return Reached()

    def mark(self) -> Moment:
        return Moment()

    def wait(self, event: object) -> None:
        return

    def work(self) -> AbstractContextManager[None]:
        if self._capacity is None:
            return nullcontext()
        return innermost(_here.capacities, self._capacity, _Counting)

    def borrow(self, tensor: torch.Tensor) -> None:
        return


class VirtualDevice:
    """One of any number of devices on the CPU.

    Args:
        index: position among the engine's devices, for its name.
        num_bytes: what it holds: more raises ``torch.OutOfMemoryError``, see [Note: counted
            memory]; None means that the host's memory is the only limit.
    """

    def __init__(self, index: int, num_bytes: int | None = None) -> None:
        self.name = f"virtual:{index}"
        self.torch_device = _CPU
        self.capacity = None if num_bytes is None else VirtualMemory(self.name, num_bytes)
        lane = VirtualLane(self.capacity)
        self.compute: Lane = lane
        self.up: Lane = lane
        self.down: Lane = lane

    def __repr__(self) -> str:
        return self.name

    def new_lane(self) -> Lane:
        return VirtualLane(self.capacity)

    def enter_thread(self) -> None:
        return

    def limit_bytes(self, held: int = 0) -> int:
        return self.capacity.num_bytes if self.capacity is not None else 1 << 62

    def memory_in_use(self) -> MemoryInUse:
        if self.capacity is None:
            return MemoryInUse(0, 0)
        return MemoryInUse(self.capacity.used, self.capacity.peak)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def rng_state(self) -> torch.Tensor:
        return state_of(torch.default_generator)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def rng_position(self) -> bytes:
        position: bytes = self.rng_state().numpy().tobytes()
        return position

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def shares_generator(self) -> bool:
        return True

    def follow_caller(self) -> None:
        return

    def lend_to_caller(self, tensor: torch.Tensor) -> None:
        return

    def capture(self, *works: Work) -> Recorded | None:
        """Runs ``works``, and has them run anew each time, on the memory that they were given."""
        for work in works:
            work()
        return Recorded(works, 0)

    def trim(self) -> None:
        return
