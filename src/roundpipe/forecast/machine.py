"""The machine that is asked about, and what is said where nothing fits it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..device import MemoryInUse
from ..errors import ConfigError
from ..plan.memory import readable
from ..system.sizes import bytes_of, in_gb
from .ways import OPTIMIZERS, Choice

# What a process has of a device before its first tensor: CUDA's context and its libraries.
CONTEXT_BYTES = 600 * 10**6
# What Python, torch and the Hugging Face libraries take of the host before a model is loaded.
PROCESS_BYTES = 1_000_000_000
# Host memory that is read and written through the ring for each byte that goes up: it reaches a
# third of a fast link (docs/performance-notes.md).
_RING_BYTES_PER_MS = 18e6


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Sizes and rates of a machine. The rates' defaults are modest: a 24 GB card over PCIe 4.

    Args:
        gpus: how many.
        gpu_memory: of each, ``"24GB"`` or a number of GB, 10**9 bytes.
        ram: of the host, likewise.
        link: GB/s of page-locked memory to and from each device, each way.
        tflops: what matrix products reach, in 10**12 operations a second; not the data sheet's.
        host: GB/s that an update reads and writes in host memory.
        cores: that an update has.
        disk: GB/s that files are read with, and written.

    Raises:
        ConfigError: a number that is not positive, or a size that is none.
    """

    gpus: int = 1
    gpu_memory: str | float = "24GB"
    ram: str | float = "64GB"
    link: float = 25.0
    tflops: float = 100.0
    host: float = 50.0
    cores: int = 16
    disk: float = 3.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("gpu_memory", "ram"):
                bytes_of(value, each.name)
            elif not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"{each.name} is {value!r}; give a positive number")
            elif each.name in ("gpus", "cores") and value != int(value):
                raise ConfigError(f"{each.name} is {value!r}; give a whole number")

    def device_bytes(self, kind: str) -> int:
        """What is left of a device of that kind for tensors."""
        num_bytes = bytes_of(self.gpu_memory, "gpu_memory")
        return num_bytes if kind == "cpu" else max(num_bytes - CONTEXT_BYTES, 1)

    @property
    def ram_bytes(self) -> int:
        return bytes_of(self.ram, "ram")

    def up_bytes_per_ms(self, pin_model: str, *, from_disk: float) -> float:
        """How fast weights go up to a device. ``from_disk``: the share that is read again."""
        link = self.link * 1e6
        if pin_model == "off":
            link = min(link, _RING_BYTES_PER_MS)
        return min(link, self.disk * 1e6 / from_disk) if from_disk else link

    def update_ms(
        self, elements: int, optimizer: str, gradient_bytes: int, *, is_on_disk: bool = False
    ) -> float:
        """An update on the host: as long as its bytes take, or its arithmetic, or the disk with
        all state.

        Args:
            gradient_bytes: of an element, as offloaded; written back it is as large.
        """
        costs = OPTIMIZERS[optimizer]
        state = 2 * (4 + costs.moment_bytes)
        return elements * max(
            (state + 2 * gradient_bytes) / (self.host * 1e6),
            1 / (costs.per_core * self.cores),
            state / (self.disk * 1e6) if is_on_disk else 0.0,
        )


class ImaginedDevice:
    """A device that plans are made for and nothing ever runs on."""

    def __init__(self, index: int, num_bytes: int, kind: str) -> None:
        self.name = f"{kind}:{index}"
        self.torch_device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
        self.compute: Any = None
        self._num_bytes = num_bytes

    def limit_bytes(self, held: int = 0) -> int:
        return self._num_bytes

    def memory_in_use(self) -> MemoryInUse:
        return MemoryInUse(0, 0)


@dataclass(frozen=True)
class Failure:
    """A failed way needs this much of a device and of the host, where the optimizer's state takes
    ``state_bytes`` of it; ``why`` if it fails otherwise."""

    choice: Choice
    device_bytes: int
    host_bytes: int
    state_bytes: int
    why: str = ""


def what_would_fit(
    failures: Sequence[Failure],
    machine: Machine,
    device_bytes: int,
    ram_bytes: int,
    *,
    is_full: bool,
    can_split: bool,
) -> str:
    """Says what the smallest ways need, and what is left to do for what is short.

    Args:
        failures: of all ways.
        device_bytes, ram_bytes: of a device and of the host, for tensors.
        is_full: all weights train.
        can_split: there may be more microbatches.
    """
    could = [each for each in failures if not each.why]
    if not could:
        return f"nothing fits: {failures[0].why}"
    device = min(could, key=lambda each: each.device_bytes)
    host = min(could, key=lambda each: each.host_bytes)
    # A plan fills nine tenths of what is free (`autoplan/memory_limit.py`).
    gpu = (device.device_bytes / 0.9 + CONTEXT_BYTES) / 1e9
    beside, ram = ((one.host_bytes + PROCESS_BYTES) / 1e9 for one in (device, host))
    has_device = device.device_bytes <= device_bytes
    has_host = host.host_bytes <= ram_bytes
    remedies = []
    if not has_device or has_host:  # where both are enough, it is not for the same way
        remedies.append("make seq smaller" + " or num_microbatch larger" * can_split)
    if not has_host or has_device:
        helps = host.host_bytes - host.state_bytes <= ram_bytes
        more = _for_the_host(host.choice, is_full=is_full, disk_helps=helps)
        remedies += more or ["make batch or seq smaller"]
    return (
        f"nothing fits into {machine.gpus} x {in_gb(machine.gpu_memory)} of device memory "
        f"({readable(device_bytes)} for tensors) and {in_gb(machine.ram)} of host memory. "
        f"Of {len(could)} ways the smallest on a device ({device.choice}) needs {gpu:.1f} GB there "
        f"and {beside:.1f} GB of host memory, the smallest on the host ({host.choice}) needs "
        f"{ram:.1f} GB of that; {', or '.join(remedies)}"
    )


def _for_the_host(smallest: Choice, *, is_full: bool, disk_helps: bool) -> list[str]:
    if is_full:
        on_disk = "put optimizer state on a disk (optimizer_state_dir)"
        adapters = "train adapters of a quantized model (lora, quantization)"
        is_there = smallest.optimizer_state_dir is not None
        return [on_disk, adapters] if disk_helps and not is_there else [adapters]
    found = []
    if smallest.quantization == "none" and smallest.pin_model == "alloc":
        found.append("quantize the weights (quantization)")
    if smallest.pin_model == "alloc":
        found.append("leave weights in their files (pin_model='off')")
    return found
