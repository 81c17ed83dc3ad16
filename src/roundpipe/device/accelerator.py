"""A CUDA-like accelerator: lanes are streams of their own, never the default stream, which would
synchronise them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import ConfigError
from .generators import state_of
from .graphs import record
from .protocol import MemoryInUse, Recorded, Work


class StreamLane:
    """One stream. Copies are asynchronous when the host side is page-locked."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)

    def copy_(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.work(), torch.no_grad():
            target.copy_(source, non_blocking=True)

    def record(self) -> "StreamEvent":
        # Because a spinning wait would take a core from the optimizer.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return StreamEvent(event)

    def mark(self) -> "StreamMark":
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return StreamMark(event)

    def wait(self, event: object) -> None:
        if isinstance(event, StreamEvent):
            self._stream.wait_event(event.cuda)

    @contextmanager
    def work(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def borrow(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(self._stream)


class StreamEvent:
    """A CUDA event. ``wait`` blocks the calling thread without holding the interpreter."""

    def __init__(self, cuda: torch.cuda.Event) -> None:
        self.cuda = cuda

    def wait(self) -> None:
        self.cuda.synchronize()


class StreamMark:
    """A CUDA event that knows when it was reached."""

    def __init__(self, cuda: torch.cuda.Event) -> None:
        self._cuda = cuda

    def seconds_since(self, earlier: "StreamMark") -> float | None:
        return earlier._cuda.elapsed_time(self._cuda) / 1e3 if self._cuda.query() else None


@functools.cache
def _lanes(index: int) -> tuple[StreamLane, StreamLane, StreamLane]:
    """Compute, up and down of one device, the same for all engines: libraries keep a workspace for
    every stream."""
    device = torch.device("cuda", index)
    # Copies get a higher priority than compute because they are short and compute waits for them.
    return StreamLane(device), StreamLane(device, priority=-1), StreamLane(device, priority=-1)


class _Entered(torch.autograd.Function):
    """The identity. Its backward has autograd's thread touch a lane, which gives it the device's
    context."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, lane: StreamLane) -> torch.Tensor:
        ctx.lane = lane
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.lane.record()
        return gradient, None


class AcceleratorDevice:
    """One accelerator.

    Args:
        device: for example ``torch.device("cuda", 0)``.
        max_bytes: keep the engine's use under this many bytes; None means what is free now.
    """

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(
                f"device {device} is not available; visible: {torch.cuda.device_count()} CUDA "
                "devices"
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"device cuda:{index} does not exist; {torch.cuda.device_count()} CUDA devices are "
                "visible"
            )
        self.torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"
        self._max_bytes = max_bytes
        torch.cuda.init()
        self.compute, self.up, self.down = _lanes(index)

    def __repr__(self) -> str:
        return self.name

    def new_lane(self) -> StreamLane:
        return StreamLane(self.torch_device, priority=-1)

    def enter_thread(self) -> None:
        """[Note: threads without a context] Kernels that torch launches give a thread its device's
        context if it has none; those that compiled C++ launches find it missing, for instance where
        such code is the first that a thread does on device 0, which torch need not switch to. That
        goes for the worker and for autograd's own thread."""
        self.compute.record()
        nothing = torch.empty(0, device=self.torch_device, requires_grad=True)
        torch.autograd.backward(_Entered.apply(nothing, self.compute), torch.empty_like(nothing))

    def limit_bytes(self, held: int = 0) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allocated = torch.cuda.memory_allocated(self.torch_device)
        reusable = torch.cuda.memory_reserved(self.torch_device) - allocated
        # Whatever else this process has on the device counts against its share too.
        allowed = (
            int(total * torch.cuda.get_per_process_memory_fraction(self.torch_device)) - allocated
        )
        available = held + min(free + reusable, allowed)
        return available if self._max_bytes is None else min(available, self._max_bytes)

    def memory_in_use(self) -> MemoryInUse:
        return MemoryInUse(
            torch.cuda.memory_allocated(self.torch_device),
            torch.cuda.max_memory_allocated(self.torch_device),
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.torch_device

    def rng_state(self) -> torch.Tensor:
        return state_of(self._generator)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._generator.set_state(state)

    def rng_position(self) -> tuple[int, int]:
        generator = self._generator
        return generator.initial_seed(), generator.get_offset()  # which is all of its state

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def shares_generator(self) -> bool:
        return False

    def follow_caller(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        for lane in (self.compute, self.up, self.down):
            lane.wait(StreamEvent(event))

    def lend_to_caller(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def capture(self, *works: Work) -> Recorded | None:
        return record(self.torch_device, works)

    def trim(self) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    @property
    def _generator(self) -> torch.Generator:
        generator: torch.Generator = torch.cuda.default_generators[self.torch_device.index]
        return generator
