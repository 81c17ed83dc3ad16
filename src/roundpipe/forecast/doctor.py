"""Looks at this machine for what keeps training from being fast: `python -m roundpipe doctor`."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from ..device import Device
from ..device.choose import choose_devices
from ..device.facts import driver, facts_of, has_accelerators
from ..kernels import native
from ..system.cores import usable_cores
from ..system.host_memory import all_host_bytes, free_host_bytes, system_bytes
from .measure import link_of, measured_machine

COLUMNS = ("what", "found", "what follows")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SECONDS = 0.5  # for each way of the link
_SLOW_LINK, _LITTLE_MEMORY = 10.0, 4e9


class Finding(NamedTuple):
    """``slow``: what it makes slow or impossible and what to do about it; empty if nothing."""

    what: str
    found: str
    slow: str = ""
    note: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        return self.what, self.found, self.slow or self.note or "ok"


def examine() -> list[Finding]:
    """Takes seconds. A check that fails is itself a finding."""
    try:
        devices = choose_devices(None, None)
    except Exception as error:
        return [Finding("devices", _in_a_line(error), "no device can be used")]
    checks: Sequence[tuple[str, Callable[[], Iterator[Finding]]]] = (
        ("software", _software),
        ("devices", lambda: _devices(devices)),
        ("link", lambda: _link(devices)),
        ("update kernel", _kernel),
        ("cores", lambda: _cores(devices)),
        ("host memory", _host),
        ("cache", _cache),
    )
    found = list[Finding]()
    for what, check in checks:
        try:
            found += check()
        except Exception as error:
            found.append(Finding(what, f"failed: {_in_a_line(error)}", "cannot be used as it is"))
    return found


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _software() -> Iterator[Finding]:
    yield Finding("software", f"Python {platform.python_version()}, torch {torch.__version__}")
    for name in ("transformers", "peft", "trl"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed", note="only its trainers and models need it")


def _devices(devices: Sequence[Device]) -> Iterator[Finding]:
    system = driver()
    if system is not None:
        yield Finding("driver", system)
    if not has_accelerators():
        slow = ""
        if system is not None:
            slow = "there is a driver, and torch cannot use it: install a torch built for CUDA"
            if torch.version.cuda is not None:
                slow = (
                    f"torch is built for CUDA {torch.version.cuda} and sees no GPU: look at "
                    "nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version"
                )
        note = "engines run on virtual devices, on the CPU: the same numbers, slowly"
        yield Finding("devices", "no GPU", slow, note)
        return
    for device in devices:
        facts = facts_of(device)
        if facts is None:
            continue
        free = facts.free_bytes / facts.total_bytes
        sizes = f"{facts.total_bytes / 1e9:.1f} GB, {facts.free_bytes / 1e9:.1f} GB free"
        others = "others use it: more is recomputed and spilled, calls may run out of memory"
        dtype = str(facts.dtype).removeprefix("torch.")
        yield Finding(
            device.name,
            f"{facts.model}, {sizes}, {dtype}",
            others if free < 0.8 else "",
            "" if facts.dtype is torch.bfloat16 else "no bf16: train with fp16=True",
        )
    if find_spec("triton") is None:
        yield Finding("triton", "not installed", "losses and sums of gradients run unfused")


def _link(devices: Sequence[Device]) -> Iterator[Finding]:
    link = link_of(devices, seconds=_SECONDS)
    if link.locking is None:
        said = f"{link.up:.1f} GB/s, in memory"
        yield Finding("copies", said, note="virtual devices have no link")
        return
    slowest = min(link.up, link.down)
    slow = (
        f"weights and gradients wait for it: {slowest:.0f} GB/s where PCIe 4 x16 has 25. Look at "
        "the slot (nvidia-smi -q, Link Width), accumulate more, quantize frozen weights"
    )
    many = "all devices at once" if len(devices) > 1 else "page-locked"
    yield Finding(
        "link",
        f"{link.up:.1f} GB/s up, {link.down:.1f} GB/s down, {many}",
        slow if slowest < _SLOW_LINK else "",
    )
    if link.locking:
        yield Finding("page-locking", f"{link.locking:.1f} GB/s, once for a model's weights")
    else:
        yield Finding(
            "page-locking",
            "refused by the system",
            "copies are several times slower: raise the container's memory limit or ulimit -l",
        )


def _kernel() -> Iterator[Finding]:
    compiler = native.compiler_path()
    kernel = native.library()
    if kernel is not None:
        brought = native.is_prebuilt(kernel)
        yield Finding("update kernel", "of the wheel" if brought else f"built by {compiler}")
        return
    does_not = "no cc, gcc or clang" if compiler is None else f"{compiler} does not compile it"
    yield Finding(
        "update kernel",
        does_not,
        "updates run on torch's kernels, slower: install gcc and glibc's headers",
    )


def _cores(devices: Sequence[Device]) -> Iterator[Finding]:
    usable, there, threads = usable_cores(), os.cpu_count() or 1, torch.get_num_threads()
    slow = ""
    if threads > usable:
        slow = f"more threads than cores wait for each other: set OMP_NUM_THREADS={usable}"
    elif has_accelerators() and usable < len(devices) + 3:
        slow = "updates have one core beside the devices' workers: give the process more"
    said = f"{usable} usable" + (f" of {there}" if there > usable else "")
    yield Finding("cores", f"{said}, {threads} threads of torch's", slow)


def _host() -> Iterator[Finding]:
    total, free, system = all_host_bytes(), free_host_bytes(), system_bytes("MemTotal")
    confined = f" of {system / 1e9:.1f} GB, by a control group" if 0 < total < system else ""
    yield Finding(
        "host memory",
        f"{total / 1e9:.1f} GB{confined}, {free / 1e9:.1f} GB free",
        "masters, moments and gradients live here: end other processes" * (free < _LITTLE_MEMORY),
    )
    swapped = system_bytes("SwapTotal") - system_bytes("SwapFree")
    if swapped > 1e9:
        yield Finding("swap", f"{swapped / 1e9:.1f} GB in use", "the host is short of memory")
    try:
        chosen = _HUGE_PAGES.read_text()
    except OSError:
        return
    slow = "updates take a fifth longer: echo madvise > " + str(_HUGE_PAGES)
    yield Finding(
        "huge pages", chosen.partition("[")[2].partition("]")[0], slow * ("[never]" in chosen)
    )


def _cache() -> Iterator[Finding]:
    folder = native.cache_folder()
    if folder is None or not native.has_room(folder):
        why = "cannot be written to" if folder is None else "has no room"
        slow = "every process compiles the kernel again: set XDG_CACHE_HOME"
        yield Finding("cache", f"{native.wanted_folder()} {why}", slow)
        return
    is_measured = bool(measured_machine())
    note = "" if is_measured else "plans assume rates: python -m roundpipe bench measures yours"
    said = "this machine is measured" if is_measured else "this machine is not measured"
    yield Finding("cache", f"{folder}, {said}", note=note)
