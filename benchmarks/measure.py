"""Timing, peaks, limits, and how a result is printed: one JSON line each, a short table last."""

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
Comment = Callable[[Record], str]


def compute_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def local_rank() -> int:
    """Returns this process's number among those that torchrun has started here."""
    return int(os.environ["LOCAL_RANK"])


def environment() -> Record:
    """The machine and the versions, for every record."""
    import transformers

    on_gpu = torch.cuda.is_available()
    return {
        "card": torch.cuda.get_device_name() if on_gpu else "none (CPU)",
        "num_gpus": torch.cuda.device_count(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "host": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        **(
            {"allocator": settings}
            if (settings := os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
            else {}
        ),
    }


def cap_gpu_memory(gigabytes: float | None) -> None:
    """From here on torch takes at most so many GB (10^9 bytes) of each GPU and is out of memory
    beyond them.

    Contexts and libraries' own memory, about half a GB, are not counted.
    """
    if gigabytes is None:
        return
    for card in range(torch.cuda.device_count()):
        total = torch.cuda.mem_get_info(card)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), card)


def time_steps(step: Callable[[], torch.Tensor], *, warmup: int, steps: int) -> Record:
    """Runs ``step`` and times it; a step returns its loss.

    The clock runs from the end of the warm-up to the end of the last step. With an asynchronous
    optimizer one update is pending at both ends, so what is measured is the steady state.
    """
    began = time.perf_counter()
    losses = [float(step()) for _ in range(warmup)]
    wait_device()
    warmup_s = time.perf_counter() - began
    reset_peaks()
    ends = [time.perf_counter()]
    for _ in range(steps):
        losses.append(float(step()))
        ends.append(time.perf_counter())
    wait_device()
    elapsed_s = time.perf_counter() - ends[0]
    return {
        "warmup": warmup,
        "warmup_s": warmup_s,
        "steps": steps,
        "step_s": elapsed_s / steps,
        "step_s_median": statistics.median(b - a for a, b in itertools.pairwise(ends)),
        "each_step_s": [b - a for a, b in itertools.pairwise(ends)],
        "loss_first": losses[0],
        "loss_last": losses[-1],
    }


def wait_device() -> None:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def reset_peaks() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)


def peaks() -> Record:
    """GPU peaks of the largest card since `reset_peaks`; the host's is the process's since it
    started."""
    record: Record = {
        "host_peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    }
    if torch.cuda.is_available():
        cards = range(torch.cuda.device_count())
        record["gpu_peak_allocated_gb"] = (
            max(torch.cuda.max_memory_allocated(card) for card in cards) / 1e9
        )
        record["gpu_peak_reserved_gb"] = (
            max(torch.cuda.max_memory_reserved(card) for card in cards) / 1e9
        )
    return record


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=8, help="timed steps (default 8)")
    parser.add_argument(
        "--warmup", type=int, default=3, help="steps before the clock starts (default 3)"
    )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cap-gb", type=float, metavar="GB", help="what torch may take of each GPU, in 10^9 bytes"
    )
    parser.add_argument(
        "--ceilings",
        type=Path,
        metavar="FILE",
        help="what ceilings.py printed here: steps are held against it",
    )


def emit(record: Record) -> None:
    print(json.dumps(_rounded(record)), flush=True)


def run_rows(
    rows: list[list[str]],
    columns: list[str],
    comment: Comment | None = None,
    launchers: list[list[str]] | None = None,
) -> int:
    """Runs this script once per row of arguments, each in a process of its own, so that one row's
    peaks, caches and compiled code are not another's. ``comment``: what to say behind each;
    ``launchers``: for each row what Python is given before the script. Returns the exit status."""
    records, failed = [], 0
    for launcher, row in zip(launchers or [[]] * len(rows), rows, strict=True):
        done = subprocess.run(
            [sys.executable, *launcher, sys.argv[0], *row],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        for record in parse_records(done.stdout):
            _show(record, comment)
            records.append(record)
        if done.returncode != 0:
            failed += 1
            print(f"failed ({done.returncode}): {' '.join(row)}", file=sys.stderr)
    print(f"\n{table(records, columns)}")
    return min(failed, 1)


def run_row(record: Record, columns: list[str], comment: Comment | None = None) -> int:
    """Prints the one row that this process was started for."""
    _show(record, comment)
    print(f"\n{table([record], columns)}")
    return 0


def _show(record: Record, comment: Comment | None) -> None:
    emit(record)
    if comment is not None:
        print(comment(record), flush=True)


def parse_records(text: str) -> list[Record]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def table(records: list[Record], columns: list[str]) -> str:
    """Markdown, right-aligned where every value is a number."""
    cells = [[_shown(record.get(column, "-")) for column in columns] for record in records]
    rules = [
        "---:" if all(_is_number(r.get(column)) for r in records) else "---" for column in columns
    ]
    widths = [max(map(len, column)) for column in zip(columns, rules, *cells, strict=True)]
    padded = [
        [
            cell.rjust(width) if rule == "---:" else cell.ljust(width)
            for cell, width, rule in zip(row, widths, rules, strict=True)
        ]
        for row in (columns, *cells)
    ]
    padded.insert(1, [rule.rjust(width, "-") for rule, width in zip(rules, widths, strict=True)])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.3g}"
            if abs(value) < 10
            else f"{value:.1f}"
        )
    # A pipe, as plans have them, would end the cell.
    return str(value).replace("|", "/")
