"""A step's time against its lower bounds, and where the rest went by the engine's own trace.

Knows neither who ran the step nor how long it should take; bounds come from rates that ceilings.py
measured.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine import Training
from measure import Record, parse_records
from torch import Tensor

from roundpipe import profile
from roundpipe.trace.profile import Block

Intervals = list[tuple[float, float]]
"""Sorted, without overlap; seconds."""

_OPTIMIZER = {"step_fn", "update", "write_back", "commit"}
TRACED_STEPS = 2


def rates_of(path: Path | None) -> dict[str, float]:
    """What ceilings.py measured, by name; nothing without a file."""
    records = [] if path is None else parse_records(path.read_text())
    return {record["what"]: record["value"] for record in records if record["bench"] == "ceilings"}


def bounds_of(record: Record, rates: dict[str, float]) -> dict[str, float]:
    """Seconds that a step takes at least for each of its parts whose rate is known.

    Compute is the matmuls (2 FLOP per parameter and token, three times for full fine-tuning, twice
    with frozen weights) and causal attention, without recompute. Weights go up once, gradients come
    down once, each device its share.
    """
    tokens, is_full, devices = (
        record["tokens_per_step"],
        record["method"] == "full",
        record.get("devices", 1),
    )
    matmul = 2 * record["params"] * tokens * (3 if is_full else 2)
    attention = 3 * 2 * record["length"] * record["hidden"] * record["layers"] * tokens
    work = {
        "compute": ((matmul + attention) / devices, "bf16 matmul", 1e12),
        "weights up": (2 * record["params"] / devices, "H2D", 1e9),
        "gradients down": (2 * record["trainable"] / devices, "D2H", 1e9),
        "host AdamW": (record["trainable"], "host AdamW (torch fused)", 1e9),
    }
    return {
        name: amount / (rates[rate] * unit)
        for name, (amount, rate, unit) in work.items()
        if rate in rates
    }


def trace(trained: Training, tokens: Tensor) -> Record:
    """Runs some steps more under the profiler; `summary` of them."""
    with profile() as profiled:
        trained.step(tokens)  # so that what a step leaves to the next one is seen whole
        begin = time.perf_counter()
        for _ in range(TRACED_STEPS):
            trained.step(tokens)
        end = time.perf_counter()
        trained.engine.synchronize()
    return summary(profiled.blocks, begin, end, TRACED_STEPS)


def summary(blocks: Sequence[Block], begin: float, end: float, steps: int) -> Record:
    """Seconds of each step between ``begin`` and ``end``, of the average device.

    ``compute_s``, ``up_s``, ``down_s``, ``optimizer_s``: how long that lane or thread was busy.
    ``uneven_s``: by how much microbatches were on the compute lane longer than the fastest of their
    stage run's kind, which is what they waited inside. ``idle_s``: what else ran while nothing was
    computed, in this order: weights on their way up, the optimizer, gradients on their way down;
    the rest is nobody's.
    """
    inside = [block for block in blocks if block.end > begin and block.start < end]
    devices = sorted({block.row.split()[0] for block in inside if "device" in block.fields})
    optimizer = _clipped((block for block in inside if block.label in _OPTIMIZER), begin, end)
    sums: Record = {
        "compute_s": 0.0,
        "uneven_s": 0.0,
        "up_s": 0.0,
        "down_s": 0.0,
        "optimizer_s": _total(optimizer),
    }
    idle = {"weights up": 0.0, "optimizer": 0.0, "gradients down": 0.0, "nothing": 0.0}
    for device in devices:
        computed = [block for block in inside if block.row == f"{device} compute"]
        compute, up, down = (
            _clipped((block for block in inside if block.row == f"{device} {lane}"), begin, end)
            for lane in ("compute", "weights up", "gradients down")
        )
        sums["compute_s"] += _total(compute) / len(devices)
        sums["uneven_s"] += _uneven(computed, begin, end) / len(devices)
        sums["up_s"] += _total(up) / len(devices)
        sums["down_s"] += _total(down) / len(devices)
        rest = _without([(begin, end)], compute)
        for name, busy in (("weights up", up), ("optimizer", optimizer), ("gradients down", down)):
            still = _without(rest, busy)
            idle[name] += (_total(rest) - _total(still)) / len(devices)
            rest = still
        idle["nothing"] += _total(rest) / len(devices)
    per_step = {name: seconds / steps for name, seconds in sums.items()}
    return {
        "step_s": (end - begin) / steps,
        **per_step,
        "idle_s": {name: s / steps for name, s in idle.items()},
    }


def line(record: Record, rates: dict[str, float]) -> str:
    """One line on a step's record: its time, its bounds, and its trace if it has one."""
    step_s = record["step_s"]
    parts = [f"roofline: step {step_s:.3f} s"]
    bounds = bounds_of(record, rates)
    if record["bench"] == "resident":  # nothing of it passes through the host
        bounds = {name: seconds for name, seconds in bounds.items() if name == "compute"}
    shown = [f"{name} {seconds:.3f} ({seconds / step_s:.0%})" for name, seconds in bounds.items()]
    parts.append(f"bounds {', '.join(shown)}" if bounds else "bounds unknown (no --ceilings)")
    if "trace" in record:
        traced = record["trace"]
        idle = ", ".join(f"{name} {seconds:.3f}" for name, seconds in traced["idle_s"].items())
        parts.append(
            f"traced {traced['step_s']:.3f}: computing {traced['compute_s']:.3f}, of which "
            f"{traced['uneven_s']:.3f} "
            f"above the fastest microbatches; not computing while {idle}"
        )
        parts.append(
            f"busy: up {traced['up_s']:.3f}, down {traced['down_s']:.3f}, optimizer "
            f"{traced['optimizer_s']:.3f}"
        )
    return "; ".join(parts)


def _uneven(computed: Sequence[Block], begin: float, end: float) -> float:
    fastest: dict[object, float] = {}
    for block in computed:
        kind = _kind(block)
        fastest[kind] = min(fastest.get(kind, block.end - block.start), block.end - block.start)
    # What reaches over the edge is shorter than it was: never less than nothing.
    return sum(
        max(0.0, min(block.end, end) - max(block.start, begin) - fastest[_kind(block)])
        for block in computed
    )


def _kind(block: Block) -> object:
    stage_run = block.fields["action"].stage_run
    return stage_run.pass_, stage_run.layers


def _clipped(blocks: Iterable[Block], begin: float, end: float) -> Intervals:
    """When any of ``blocks`` ran."""
    merged: Intervals = []
    for start, stop in sorted((max(block.start, begin), min(block.end, end)) for block in blocks):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _without(whole: Intervals, holes: Intervals) -> Intervals:
    left = []
    for start, stop in whole:
        for first, last in holes:
            if start < last and first < stop:
                if start < first:
                    left.append((start, first))
                start = last
        if start < stop:
            left.append((start, stop))
    return left


def _total(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)
