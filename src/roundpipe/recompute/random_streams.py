"""What makes running a layer twice give the same result: its random stream and the ambient state of
the caller."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from ..device import Device
from ..device.generators import state_of
from ..system.cores import threads_for
from ..threads.interrupts import deferred

# One process has one CPU generator: layers that may draw from it run one at a time on virtual
# devices.
_cpu_generator_lock = threading.RLock()
_MASK = (1 << 64) - 1


def _mix(seed: int, layer: int, microbatch: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014) over the three numbers."""
    value = seed
    for part in (layer, microbatch):
        value = (value + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1


class RandomStreams:
    """Every (layer, microbatch) of a call draws from a stream of its own, the same again in
    recompute.

    [Note: random streams] Streams derive from the caller's CPU generator without advancing it; it
    advances by one draw when the call ends, and only if some layer drew. Generators of the process
    are touched only while the caller waits inside the call, because afterwards they are the
    caller's: a call in which a layer drew returns after its last stage run.
    """

    def __init__(self, devices: list[Device], *, enabled: bool) -> None:
        self._devices = devices
        self.enabled = enabled
        self.drawn: set[tuple[int, int]] = set()
        self.take_over()
        with deferred():
            self._seed = _draw() if enabled else 0
            torch.set_rng_state(self._before)

    def take_over(self) -> None:
        """The caller waits from now on: remembers what its generators must look like afterwards."""
        self._before = state_of(torch.default_generator)
        self._device_states = (
            [device.rng_state() for device in self._devices] if self.enabled else []
        )

    def give_back(self, *, advance: bool) -> None:
        """The generators are the caller's again: as before, or with ``advance`` one draw on if a
        layer drew."""
        if not self.enabled:
            return
        for device, state in zip(self._devices, self._device_states, strict=True):
            device.set_rng_state(state)
        torch.set_rng_state(self._before)
        if advance and self.drawn:
            _draw()

    @contextmanager
    def layer(
        self, device: Device, layer: int, microbatch: int, *, again: bool = False
    ) -> Iterator[None]:
        """The block draws from the stream of (layer, microbatch). ``again``: it is a recompute."""
        key = (layer, microbatch)
        if not self.enabled or (again and key not in self.drawn):
            yield
            return
        with _cpu_generator_lock if device.shares_generator() else nullcontext():
            device.seed(_mix(self._seed, layer, microbatch))
            if again:
                yield
                return
            before = device.rng_position()
            yield
            if device.rng_position() != before:
                self.drawn.add(key)

    @contextmanager
    def undisturbed(self, device: Device, layers: range, microbatch: int) -> Iterator[None]:
        """The block is the layers' backward, in which those that checkpoint themselves set the
        generator to what it was and run again: nobody else draws from it meanwhile."""
        draws = (
            self.enabled
            and device.shares_generator()
            and any((layer, microbatch) in self.drawn for layer in layers)
        )
        with _cpu_generator_lock if draws else nullcontext():
            yield


def _draw() -> int:
    return int(torch.randint(1 << 62, (), device="cpu").item())


@dataclass(frozen=True)
class AmbientState:
    """The thread-local state of the caller that decides what a layer computes, carried into
    workers."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    num_threads: int

    @classmethod
    def of_caller(cls, device_types: Sequence[str]) -> "AmbientState":
        """``device_types``: of each device. Virtual ones share the cores, so that the intra-op
        threads of all workers are no more than these."""
        return cls(
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted(set(device_types))
            ),
            num_threads=threads_for(device_types.count("cpu")),
        )

    @contextmanager
    def entered(self, device_type: str, *, grad: bool) -> Iterator[None]:
        """The calling thread computes as the caller would.

        But for autocast's cache: all threads share it, and whoever leaves autocast empties it.
        Whether a weight that a layer uses twice is cast once or twice would be a matter of timing,
        and gradients add up differently.
        """
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        enabled, dtype = next(
            (on, dtype) for kind, on, dtype in self.autocast if kind == device_type
        )
        with (
            torch.set_grad_enabled(grad),
            torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False),
        ):
            yield
