"""How many cores this process may use. Containers often show all of their host's and are given the time of a few."""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Those that this thread is bound to, or as many as make up its container's quota of time if these are fewer."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """In cores, of the control groups that this process is in, as far as they have any and it may see them."""
    for line in _lines(_OWN_GROUPS):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy != "0" and "cpu" not in controllers.split(","):
            continue
        top = _GROUPS if hierarchy == "0" else _GROUPS / "cpu"
        inside = PurePosixPath(path.strip()).relative_to("/")
        for group in (inside, *inside.parents):  # because a group is held to the quotas of those it is in, too
            yield from _quota(top / group)


def _quota(group: Path) -> Iterator[float]:
    # A file for both numbers in version 2 of control groups, one for each in version 1.
    words = " ".join(_lines(group / "cpu.max")).split() or [
        *_lines(group / "cpu.cfs_quota_us"),
        *_lines(group / "cpu.cfs_period_us"),
    ]
    if len(words) == 2 and words[0] not in ("max", "-1"):
        yield int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
