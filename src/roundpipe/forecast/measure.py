"""Measures what this machine does, and keeps it for plans: `python -m roundpipe bench`."""

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ..device import Device, Lane
from ..device.choose import choose_devices
from ..device.facts import facts_of
from ..errors import ConfigError, RoundPipeError
from ..kernels import native, updates
from ..kernels.updates import RuleUpdate, UpdateInto
from ..memory import huge_pages
from ..memory.pinning import HostArena, HostMemory
from ..optim.optimizers import AdamRule
from ..system.cores import leave_cores_for
from ..system.host_memory import all_host_bytes, free_host_bytes
from .machine import Machine

_SECONDS, _ROUND_SECONDS = 2.0, 0.05  # of each measurement, and of a part of it that counts
_COPIED_BYTES = 256 << 20
_MATRIX, _MATRIX_ON_CPU = 8192, 1024
_ELEMENTS = 4 << 20  # of one weight in an update
_MOST_WEIGHTS, _BYTES_OF_ELEMENT = 16, 4 + 8 + 2 + 2
# Read and written by AdamW for an element: `Machine.update_ms` takes the same.
_MOVED_BYTES = 2 * (4 + 8) + 2 * 2
_RULE = AdamRule(
    step=2.0,
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    amsgrad=False,
    maximize=False,
    is_decoupled=True,
)


class Link(NamedTuple):
    """GB/s to and from each device while all others copy too, and those of page-locking new
    memory: None where no device needs it, 0 where the system refused."""

    up: float
    down: float
    locking: float | None


class Update(NamedTuple):
    """Elements a second that AdamW updates on the host, and the threads it has for that."""

    per_second: float
    cores: int


def measure() -> dict[str, Any]:
    """Takes ten seconds. ``machine``: what plans are made with, for `Machine`; without an
    accelerator only what is the host's. The rest is for people."""
    devices = choose_devices(None, None)
    known = [facts for device in devices if (facts := facts_of(device))]
    dtype = known[0].dtype if known else torch.float32
    tflops, link, update = matmul_tflops(devices, dtype), link_of(devices), update_of(len(devices))
    machine: dict[str, Any] = {
        "ram": f"{all_host_bytes() / 1e9:.1f}GB",
        "host": update.per_second * _MOVED_BYTES / 1e9,
        "cores": update.cores,
    }
    if known:
        machine |= {
            "gpus": len(known),
            "gpu_memory": f"{min(facts.total_bytes for facts in known) / 1e9:.1f}GB",
            "link": min(link.up, link.down),
            "tflops": tflops,
        }
    return {
        "machine": machine,
        "measured_at": time.strftime("%Y-%m-%d %H:%M"),
        "devices": [facts.model for facts in known] or ["virtual, on the CPU"],
        "dtype": str(dtype).removeprefix("torch."),
        "tflops": tflops,
        "link_up": link.up,
        "link_down": link.down,
        "page_locking": link.locking,
        "parameters_per_second": update.per_second,
    }


def cells(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of a table of what `measure` has returned."""
    update = f"{found['parameters_per_second'] / 1e9:.2f}", found["machine"]["host"]
    locking = found["page_locking"]
    return [
        ("devices", ", ".join(found["devices"])),
        ("matrix products", f"{found['tflops']:.3g} * 10^12 operations/s in {found['dtype']}"),
        ("to each device", f"{found['link_up']:.1f} GB/s"),
        ("from each device", f"{found['link_down']:.1f} GB/s"),
        ("page-locking", "not needed" if locking is None else f"{locking:.1f} GB/s"),
        (
            "updates",
            f"{update[0]} * 10^9 parameters/s, {update[1]:.1f} GB/s, by "
            f"{found['machine']['cores']} threads",
        ),
        ("host memory", found["machine"]["ram"]),
    ]


def matmul_tflops(devices: Sequence[Device], dtype: torch.dtype) -> float:
    """Times products of large matrices on the slowest device, in 10**12 operations a second,
    all of them at work."""
    size = _MATRIX if devices[0].torch_device.type != "cpu" else _MATRIX_ON_CPU

    def product_on(device: Device) -> Callable[[], None]:
        with device.compute.work():
            # Random, because a GPU is faster with numbers that are all the same.
            a, b, c = (
                torch.randn(size, size, dtype=dtype, device=device.torch_device) for _ in range(3)
            )

        def multiply() -> None:
            with device.compute.work():
                torch.mm(a, b, out=c)

        return multiply

    per_second = _rate([(device.compute, product_on(device)) for device in devices])
    return per_second * 2 * size**3 / 1e12


def link_of(devices: Sequence[Device], *, seconds: float | None = None) -> Link:
    """Measures copies of page-locked memory; memory that the system does not lock is copied as it
    is."""
    is_accelerated = devices[0].torch_device.type != "cpu"
    memory = HostMemory("alloc", accelerated=is_accelerated)
    began = time.perf_counter()
    arenas = [memory.arena(_COPIED_BYTES) for _ in devices]
    locking = None
    if is_accelerated:
        elapsed = time.perf_counter() - began
        are_locked = all(arena.bytes.is_pinned() for arena in arenas)
        locking = len(arenas) * _COPIED_BYTES / elapsed / 1e9 if are_locked else 0.0
    ways = []
    for is_up in (True, False):
        works = [
            _copy(device, arena, is_up=is_up) for device, arena in zip(devices, arenas, strict=True)
        ]
        ways.append(_rate(works, seconds) * _COPIED_BYTES / 1e9)
    up, down = ways
    return Link(up, down, locking)


def _copy(device: Device, arena: HostArena, *, is_up: bool) -> tuple[Lane, Callable[[], None]]:
    lane = device.up if is_up else device.down
    with lane.work():
        there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device.torch_device)
    target, source = (there, arena.bytes) if is_up else (arena.bytes, there)
    return lane, lambda: lane.copy_(target, source)


def update_of(num_devices: int) -> Update:
    """On a thread that leaves cores to the devices' workers, as the optimizer's does."""
    fits = free_host_bytes() // 4 // (_ELEMENTS * _BYTES_OF_ELEMENT)
    found: list[Update] = []

    def run() -> None:
        leave_cores_for(num_devices)()
        made = [_weight() for _ in range(max(1, min(_MOST_WEIGHTS, fits)))]
        rate = _settled(lambda count: _timed(lambda: updates.compute(made), count))
        found.append(Update(rate * len(made) * _ELEMENTS, torch.get_num_threads()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not found:
        raise RoundPipeError("an update could not be measured")
    return found[0]


def _weight() -> UpdateInto:
    weight, mean, square = (huge_pages.zeros((_ELEMENTS,), torch.float32) for _ in range(3))
    gradient = torch.full((_ELEMENTS,), 0.01, dtype=torch.bfloat16)
    update = RuleUpdate(weight, (mean, square), (gradient,), 1.0, False, _RULE)
    return UpdateInto(update, torch.zeros(_ELEMENTS, dtype=torch.bfloat16))


def _rate(works: Sequence[tuple[Lane, Callable[[], None]]], seconds: float | None = None) -> float:
    """Counts how often a second the slowest lane does its work while the others do theirs."""

    def take(count: int) -> float:
        marks = []
        for lane, work in works:
            begin = lane.mark()
            for _ in range(count):
                work()
            marks.append((lane, begin, lane.mark()))
        for lane, *_ in marks:
            lane.record().wait()
        return max(end.seconds_since(begin) or 0.0 for _, begin, end in marks)

    return _settled(take, seconds)


def _settled(take: Callable[[int], float], seconds: float | None = None) -> float:
    """Times a second, in the middle of several rounds. ``take``: how long so many times take."""
    take(1)  # what is made once for the first
    count, rates, until = 1, list[float](), time.perf_counter() + (seconds or _SECONDS)
    while not rates or time.perf_counter() < until:
        elapsed = take(count)
        if elapsed < _ROUND_SECONDS:
            count *= 2
        else:
            rates.append(count / elapsed)
    return median(rates)


def _timed(work: Callable[[], None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        work()
    return time.perf_counter() - began


# What was measured, for the next process.


def measured_file() -> Path:
    """Where this machine's measurement is kept. A home may be shared by machines of several
    kinds."""
    kind = hashlib.sha256(native.processor().encode()).hexdigest()[:16]
    return native.wanted_folder() / f"machine-{kind}.json"


def check_writable() -> Path:
    """The file, before anything is measured for it.

    Raises:
        ConfigError: nobody would find it again.
    """
    folder = native.cache_folder()
    if folder is None or not native.has_room(folder):
        why = "cannot be written to" if folder is None else "has no room"
        raise ConfigError(
            f"{native.wanted_folder()} {why}, so plans would not find what is measured; set "
            "XDG_CACHE_HOME to another folder"
        )
    return measured_file()


def keep(found: dict[str, Any], file: Path) -> None:
    """Puts what `measure` has returned in place as a whole: another process may be planning."""
    with tempfile.TemporaryDirectory(dir=file.parent) as writing:
        made = Path(writing) / file.name
        made.write_text(json.dumps(found, indent=2))
        made.replace(file)


def measured_machine(*, is_virtual: bool = False) -> dict[str, Any]:
    """What `bench` has found here, for `Machine`; nothing where it has not run, or where what it
    has left is no longer understood. ``is_virtual``: the rates of virtual devices, if it has run
    on those."""
    try:
        found = json.loads(measured_file().read_text())
        machine: dict[str, Any] = found["machine"]
        if is_virtual:
            on_gpu = "gpus" in machine
            machine = {name: machine[name] for name in ("ram", "host", "cores")}
            if not on_gpu:
                machine |= {"tflops": found["tflops"], "link": found["link_up"]}
        Machine(**machine)
    except (OSError, ValueError, LookupError, TypeError):  # ConfigError is a ValueError
        return {}
    return machine
