"""What a profile or an exported trace shows: how busy each lane was, and what a step waited for."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError

COMPUTE, UP, DOWN = "compute", "weights up", "gradients down"
LANES = (COMPUTE, UP, DOWN)
COLUMNS = ("where", "busy", "busy ms", "idle ms", "longest idle", "blocks")
# Of a thread: the rest of what it does is waiting.
OPTIMIZER = ("step_fn", "update", "write_back", "commit")
WAITING = "wait_offloaded"
_ADVICE = {
    "compute": "nothing is as busy as what devices compute",
    "upload": "weights on their way up; more tokens in a step, or quantized weights, hide them",
    "download": "gradients on their way down; accumulate more in a step",
    "optimizer": "updates on the host; steps with is_async=True hide them",
    "data": "no device and no update: the data, or the script between calls",
}


class Block(NamedTuple):
    """Something that ran in one row of the drawing: a lane of a device, or a thread. Times in
    seconds."""

    row: str
    label: str
    start: float
    end: float
    fields: dict[str, Any]


Spans = list[tuple[float, float]]


class Summary(NamedTuple):
    """``shares``: of the time, by what was busy, the largest first; they overlap, and "data" is
    when nothing was. ``seconds``: from the first block to the last."""

    seconds: float
    rows: list[tuple[str, ...]]
    shares: dict[str, float]

    @property
    def bound(self) -> str:
        return next(iter(self.shares), "nothing")

    @property
    def title(self) -> str:
        return f"{1e3 * self.seconds:.1f} ms, bound by {self.bound}"

    def verdict(self) -> str:
        """What bounds the steps, and what else there was, on two lines."""
        if not self.shares:
            return "nothing ran"
        said = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
        return f"Bound by {self.bound}: {_ADVICE[self.bound]}.\n  of the time: {said}"


def summarize(blocks: Sequence[Block]) -> Summary:
    """Counts how busy rows were. What is busiest bounds the step, devices taken on average."""
    if not blocks:
        return Summary(0.0, [], {})
    first, last = min(block.start for block in blocks), max(block.end for block in blocks)
    seconds = max(last - first, 1e-9)
    rows, lanes = [], dict[str, list[float]]()
    for row in rows_of(blocks):
        mine = [block for block in blocks if block.row == row and block.label != WAITING]
        busy = merged((block.start, block.end) for block in mine)
        idle = gaps(busy, first, last)
        taken = _length(busy)
        longest = max((end - start for start, end in idle), default=0.0)
        numbers = (f"{1e3 * each:.1f}" for each in (taken, seconds - taken, longest))
        rows.append((row, f"{taken / seconds:.0%}", *numbers, str(len(mine))))
        lanes.setdefault(lane_of(row) or "", []).append(taken / seconds)
    updates = merged((block.start, block.end) for block in blocks if block.label in OPTIMIZER)
    on_lanes = ((b.start, b.end) for b in blocks if lane_of(b.row))
    shares = {
        name: sum(busy_shares) / len(busy_shares)
        for name, lane in (("compute", COMPUTE), ("upload", UP), ("download", DOWN))
        if (busy_shares := lanes.get(lane))
    }
    shares["optimizer"] = _length(updates) / seconds
    shares["data"] = max(0.0, 1 - _length(merged([*on_lanes, *updates])) / seconds)
    return Summary(seconds, rows, dict(sorted(shares.items(), key=lambda one: -one[1])))


def lane_of(row: str) -> str | None:
    """The lane of a device that a row is about; None for a thread's."""
    return next((lane for lane in LANES if row.endswith(f" {lane}")), None)


def rows_of(blocks: Iterable[Block]) -> list[str]:
    return sorted({block.row for block in blocks})


def merged(times: Iterable[tuple[float, float]]) -> Spans:
    """The same times without overlaps, in order."""
    found: Spans = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def gaps(busy: Spans, first: float, last: float) -> Spans:
    """What is between ``busy`` times, which are in order and do not overlap."""
    edges = [first, *(edge for times in busy for edge in times), last]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _length(times: Spans) -> float:
    return sum(end - start for start, end in times)


def read(path: str | os.PathLike[str]) -> list[Block]:
    """The blocks of a trace that a profile has exported.

    Raises:
        ConfigError: no file, or one that is no such trace.
    """
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        found = [
            Block(rows[e["tid"]], e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"])
            for e in events
            if e["ph"] == "X"
        ]
        if any(not block.end >= block.start for block in found):
            raise ValueError("a block ends before it begins")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is no trace that roundpipe.profile() has exported") from error
    if not any(lane_of(block.row) for block in found):
        raise ConfigError(
            f"{path} shows no lane of a device; run calls, and synchronize(), inside of "
            "`with roundpipe.profile(path):`"
        )
    return found
