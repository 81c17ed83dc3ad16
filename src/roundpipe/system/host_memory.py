"""How much host memory is still to be had, for the system and for the group of processes this one
is confined to."""

import ctypes
from pathlib import Path

from .cgroups import own_groups

# Left to the system and the caller when memory is taken for speed only.
SPARED_BYTES = 2 << 30
_SYSTEM, _PROCESS = Path("/proc/meminfo"), Path("/proc/self/status")


def free_host_bytes() -> int:
    """Bytes that can be taken without swapping; 0 where the system does not tell."""
    free = system_bytes("MemAvailable")
    groups = (_free_in(folder) for folder in own_groups("memory"))
    return min([free, *(group for group in groups if group is not None)]) if free else 0


def resident_bytes() -> int:
    """Returns what this process has in memory that is no file's; 0 if the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in _PROCESS.read_text().splitlines())
        return 1024 * sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem"))
    except (OSError, LookupError, ValueError):
        return 0


def return_freed() -> None:
    """Has malloc give the system what was freed of small tensors, of which it keeps all but the
    last: nobody can use it for page-locked memory. Does nothing where malloc is not glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def all_host_bytes() -> int:
    """Bytes that this process could have if it were alone; 0 where the system does not tell."""
    limits = (_limit_of(folder) for folder in own_groups("memory"))
    return min([system_bytes("MemTotal"), *(limit for limit in limits if limit is not None)])


def system_bytes(name: str) -> int:
    """What the system says of its memory by that name; 0 if it says nothing."""
    try:
        lines = dict(line.split(":", 1) for line in _SYSTEM.read_text().splitlines())
        return int(lines[name].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return 0


def _limit_of(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            most = (folder / name).read_text().strip()
        except OSError:
            continue
        return None if most == "max" else int(most)
    return None


def _free_in(folder: Path) -> int | None:
    for limit, usage, cache, shared in (
        ("memory.max", "memory.current", "file", "shmem"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    ):
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            counts = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines()
            )
        except (OSError, ValueError):
            continue
        if most == "max":
            return None
        # File pages count as used but are given up when memory is needed; but for memory shared
        # between processes, our own arenas among it, which counts as if it were a file's.
        dropped = int(counts.get(cache, 0)) - int(counts.get(shared, 0))
        return max(0, int(most) - used + dropped)
    return None
