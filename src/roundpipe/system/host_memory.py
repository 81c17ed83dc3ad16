"""How much host memory is still to be had, for the system and for the group of processes this one
is confined to."""

from pathlib import Path

from .cgroups import own_groups

# Left to the system and the caller when memory is taken for speed only.
SPARED_BYTES = 2 << 30
_SYSTEM = Path("/proc/meminfo")


def free_host_bytes() -> int:
    """Bytes that can be taken without swapping; 0 where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in _SYSTEM.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
    return min(
        [
            free,
            *(
                group_free
                for folder in own_groups("memory")
                if (group_free := _free_in(folder)) is not None
            ),
        ]
    )


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
