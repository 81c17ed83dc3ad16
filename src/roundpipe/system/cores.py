"""How many cores this process may use. Containers often show all of their host's and are given the
time of a few."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from .cgroups import own_groups


def usable_cores() -> int:
    """Those that this thread is bound to, or as many as make up its container's quota of time if
    these are fewer."""
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quotas = (quota for group in own_groups("cpu") if (quota := _quota(group)) is not None)
    return max(1, min([bound, *map(math.ceil, quotas)]))


def _quota(group: Path) -> float | None:
    """In cores. One file tells time and period in version 2 of control groups, two files in version
    1."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            time, period = " ".join((group / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return None if time in ("max", "-1") else int(time) / int(period)
    return None


def threads_for(num_workers: int) -> int:
    """How many intra-op threads each of ``num_workers`` that compute on the CPU at once uses: the
    caller's number, or if that is less a share of the cores. More than there are would wait for
    each other."""
    given = torch.get_num_threads()
    if num_workers < 2 or given == 1:
        return given
    return min(given, max(1, usable_cores() // num_workers))


def leave_cores_for(num_devices: int) -> Callable[[], None]:
    """A job that limits the intra-op threads of the thread it runs on.

    Each device's worker issues work from a core of its own and the caller needs one; an update that
    takes all cores is several times slower than one that leaves a quarter of them, because its
    threads then wait for each other.
    """
    cores = usable_cores()
    return limit_threads(max(1, min(cores - num_devices - 1, cores * 3 // 4)))


def limit_threads(count: int) -> Callable[[], None]:
    """A job that gives the thread it runs on ``count`` intra-op threads."""

    def limit() -> None:
        torch.set_num_threads(count)
        # Until a thread first asks, torch has it follow whatever number another thread has set
        # since.
        torch.get_num_threads()

    return limit
