"""How much host memory is still to be had, for the system and for the group of processes this one is confined to."""

from pathlib import Path

_SYSTEM = Path("/proc/meminfo")
_GROUP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Bytes that can be taken without swapping; 0 where the system does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in _SYSTEM.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
    return min([free, *(group_free for folder in _own_groups() if (group_free := _free_in(folder)) is not None)])


def _own_groups() -> list[Path]:
    """The folders of the group and of all it is part of; of the two versions of the interface."""
    try:
        lines = _GROUP.read_text().splitlines()
    except OSError:
        return []
    own = [line.split(":", 2) for line in lines]
    roots = [(_GROUPS if not kinds else _GROUPS / "memory", path) for _, kinds, path in own if kinds in ("", "memory")]
    folders = []
    for root, path in roots:
        folder = root / path.lstrip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return folders


def _free_in(folder: Path) -> int | None:
    for limit, usage, cache, shared in (
        ("memory.max", "memory.current", "file", "shmem"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    ):
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most == "max":
            return None
        # File pages count as used but are given up when memory is needed; but for memory shared between processes, our
        # own arenas among it, which counts as if it were a file's.
        dropped = int(counts.get(cache, 0)) - int(counts.get(shared, 0))
        return max(0, int(most) - used + dropped)
    return None
