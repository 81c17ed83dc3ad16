"""CUDA graphs: work that is queued again in one go. See docs/internals/device-graphs.md."""

import functools
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from .protocol import Recorded, Work

_log = logging.getLogger("roundpipe")


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """Recorded on, because others queue work on the lanes meanwhile, which is not to be recorded.
    One for each device: libraries keep a workspace for every stream."""
    return torch.cuda.Stream(device)


def record(device: torch.device, works: Sequence[Work]) -> Recorded | None:
    """Records ``works``, which run on the calling thread's current stream from then on.

    They run once before, because what libraries make with their first work on a stream must not be
    a part of a graph. All share one pool of memory, so they are to be done in this order, and the
    last before the first is done again.

    Returns None if they cannot be recorded, for instance because they wait for a value.
    """
    side, current = _side(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    replays: list[Work] = []
    try:
        with torch.cuda.stream(side):
            for work in works:
                work()
            before = torch.cuda.memory_reserved(device)
            pool = torch.cuda.graph_pool_handle()
            for work in works:
                graph = torch.cuda.CUDAGraph()
                if not _is_recorded(graph, work, pool, device):
                    _record_nothing()
                    break
                replays.append(graph.replay)
    finally:
        current.wait_stream(side)
    if len(replays) < len(works):
        return None
    return Recorded(tuple(replays), torch.cuda.memory_reserved(device) - before)


def _is_recorded(graph: torch.cuda.CUDAGraph, work: Work, pool: Any, device: torch.device) -> bool:
    # Only what this thread does is restricted, because others may allocate or wait meanwhile.
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
        is_done = True
    except Exception as error:
        _log.debug("work is not recorded: %s", error)
        is_done = False
    try:
        graph.capture_end()
    except RuntimeError as error:
        _log.debug("work is not recorded: %s", error)
        _end_pool(device, pool)
        return False
    return is_done


def _end_pool(device: torch.device, pool: Any) -> None:
    """torch ends a recording for its allocator only if that ended well. Until then nothing that
    another stream has used is taken back, and unused memory cannot be given back at all."""
    with suppress(RuntimeError):  # it is ended already
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def _record_nothing() -> None:
    """After a recording that failed, torch takes the device's generator to be recorded until the
    next one ends well."""
    graph = torch.cuda.CUDAGraph()
    nothing = torch.zeros((), device="cuda")
    graph.capture_begin(capture_error_mode="thread_local")
    nothing.zero_()
    graph.capture_end()
