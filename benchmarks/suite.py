"""Runs named lists of benchmarks, each row in a process of its own with a time limit: one command
does much.

    python benchmarks/suite.py targets-32k lora-8b --out run.jsonl

A row's JSON lines are in the file as soon as they are printed. A row that fails or takes too long
is said to have, and the next one goes on. Ceilings are measured first, unless the file has some
already. The same command again goes on: rows that ended well are named in FILE.done and left out.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Record, parse_records, table

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One process: ``command`` is a script of this folder and its arguments; it may take
    ``limit_s`` seconds."""

    command: str
    limit_s: int

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)


FULL = "--model qwen3-1.7b --methods full"
LORA = "--model llama-3-8b --methods lora"
OURS = "throughput.py --compile --warmup 4 --steps 6"
CEILING = "resident.py --warmup 2 --steps 5 --systems"
CEILINGS = Row("ceilings.py --steps 5", 60)
SUITES = {
    "targets-32k": [
        Row(f"{CEILING} ceiling {FULL}", 90),
        Row(f"{OURS} {FULL} --modes async --num-microbatch 4", 100),
        Row(f"{OURS} {FULL} --modes async --num-microbatch 2", 100),
        Row(f"{OURS} {FULL} --modes sync --num-microbatch 4", 100),
    ],
    "targets-131k": [
        Row(f"{CEILING} ceiling {FULL} --rows 64 --num-microbatch 16 --warmup 1 --steps 3", 100),
        Row(f"{OURS} {FULL} --modes async --rows 64 --num-microbatch 16 --steps 4", 120),
    ],
    "targets-8k": [
        # Long warm-ups: an asynchronous run knows after some steps that its updates are slow, and
        # then moves them.
        Row(f"{OURS} {FULL} --modes async --rows 4 --num-microbatch 2 --warmup 12 --steps 12", 120),
        Row(f"{OURS} {FULL} --modes sync --rows 4 --num-microbatch 2 --warmup 8 --steps 12", 120),
    ],
    "full-4b": [
        Row(f"{OURS} --model qwen3-4b --modes async --rows 32 --num-microbatch 8 --steps 4", 180),
        Row(f"{OURS} --model qwen3-4b --modes sync --rows 32 --num-microbatch 8 --steps 4", 180),
    ],
    "capped-24": [
        Row(f"{CEILING} recompute {FULL}", 90),
        Row(f"{OURS} {FULL} --modes async --cap-gb 24 --num-microbatch 4", 100),
        Row(f"{OURS} {FULL} --modes async --cap-gb 24 --num-microbatch 8", 100),
        Row(f"{CEILING} recompute {LORA}", 120),
        Row(f"{OURS} {LORA} --modes async --cap-gb 24 --num-microbatch 8", 150),
        Row(f"{OURS} {LORA} --modes async --cap-gb 24 --rows 2 --num-microbatch 2 --steps 12", 120),
    ],
    "lora-8b": [
        Row(f"{CEILING} ceiling {LORA}", 120),
        Row(f"{OURS} {LORA} --modes async --num-microbatch 4", 150),
        Row(f"{OURS} {LORA} --modes async --rows 2 --num-microbatch 2 --steps 12", 120),
    ],
    "correctness": [
        Row("loss_curve.py --methods full", 120),
        Row("loss_curve.py --methods lora", 90),
        Row("loss_curve.py --methods full --compile --plan 'F 0-2 | X 3-7 | B 0-2'", 120),
        Row(f"steady.py {FULL} --compile --modes async --minutes 8", 585),
    ],
    "lengths": [
        Row(f"max_length.py {FULL} --compile --cap-gb 24 --start 92160 --limit-s 120", 220),
        Row(f"max_length.py {LORA} --compile --cap-gb 24 --start 65536 --limit-s 150", 280),
    ],
    "two-gpus": [
        Row(f"scale.py --compile --warmup 4 --steps 8 {what} --devices {devices}", 400)
        for what in (FULL, f"{LORA} --cap-gb 24 --tokens 65536 262144")
        for devices in (1, 2)
    ],
    # The README's chart.
    "chart": [
        Row(f"{OURS} {FULL} --modes async", 100),
        Row(f"{CEILING} hf {FULL}", 90),
        Row(f"public_roundpipe.py --warmup 3 --steps 5 {FULL}", 120),
        Row(f"rivals.py --warmup 1 --steps 3 {FULL} --systems fsdp2-sum", 150),
        Row(f"rivals.py --warmup 1 --steps 3 {FULL} --systems zero2", 150),
        Row(f"{OURS} {FULL} --modes sync", 100),
        Row(f"{OURS} {FULL} --modes async --cap-gb 24", 100),
        Row(f"throughput.py --warmup 4 --steps 6 {FULL} --modes async", 90),
        Row(f"rivals.py --warmup 1 --steps 2 {FULL} --systems zero3", 150),
        Row(f"rivals.py --warmup 1 --steps 1 {FULL} --systems fsdp2", 150),
        Row(f"{CEILING} ceiling {FULL}", 90),
    ],
    "rivals": [
        Row(f"rivals.py {what} --systems {system}", 240)
        for what, systems in (
            (FULL, ("hf", "fsdp2", "fsdp2-sum", "zero2", "zero3")),
            (LORA, ("hf", "fsdp2", "zero2", "zero3")),
        )
        for system in systems
    ],
}  # fmt: skip


def run_row(row: Row, extra: list[str], out: Path, limit_s: float) -> Record:
    """Runs it, writing its JSON lines behind ``out``'s as they come; what became of it."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / row.arguments[0]), *row.arguments[1:], *extra]
    # A group of its own, because whoever is stopped takes the processes it has started along.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, stop)
    timer.start()
    records = []
    try:
        assert process.stdout is not None
        with out.open("a") as file:
            for line in process.stdout:
                print(line, end="", flush=True)
                for record in parse_records(line):
                    records.append(record)
                    file.write(line)
                    file.flush()
        status = process.wait()
    finally:
        timer.cancel()
        if (
            process.returncode is None
        ):  # this process was interrupted, which the row's group was not told
            os.killpg(process.pid, signal.SIGKILL)
    became = (
        f"stopped after {limit_s:.0f} s"
        if late.is_set()
        else "ok"
        if status == 0
        else f"failed ({status})"
    )
    figure = next(
        (
            record[name]
            for record in records
            for name in ("tokens_per_s", "value")
            if name in record
        ),
        "-",
    )
    if became == "ok":
        with done_file(out).open("a") as file:
            file.write(f"{row.command}\n")
    return {"row": row.command, "became": became, "figure": figure, "s": time.monotonic() - began}


def done_file(out: Path) -> Path:
    """Has the commands of the rows that ended well and left their lines in ``out``."""
    return out.with_name(f"{out.name}.done")


def run(rows: list[Row], out: Path, limit_s: float, extra: list[str]) -> list[Record]:
    """All rows; one that cannot end within the limit is not begun."""
    deadline, results = time.monotonic() + limit_s, []
    for row in rows:
        left = deadline - time.monotonic()
        if left < min(row.limit_s, 30):
            result: Record = {
                "row": row.command,
                "became": "not begun: no time left",
                "figure": "-",
                "s": 0.0,
            }
        else:
            print(f"== {row.command}", flush=True)
            own = [] if row.command == CEILINGS.command else ["--ceilings", str(out)]
            result = run_row(row, [*own, *extra], out, min(row.limit_s, left))
        print(f"== {result['became']}, {result['s']:.0f} s: {row.command}", flush=True)
        results.append(result)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="+", choices=list(SUITES), metavar="NAME", help=", ".join(SUITES)
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="JSON lines go behind what it has; report.py reads it",
    )
    parser.add_argument("--only", default="", help="only rows whose command has this text in it")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="seconds for all of it"
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try it on a CPU")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    options = parser.parse_args()
    rows = [row for name in options.names for row in SUITES[name] if options.only in row.command]
    options.out.touch()
    if not any(record["bench"] == "ceilings" for record in parse_records(options.out.read_text())):
        rows = [CEILINGS, *rows]
    done = (
        done_file(options.out).read_text().splitlines() if done_file(options.out).exists() else []
    )
    rows = [row for row in rows if row.command not in done]
    if options.list:
        print("\n".join(f"{row.limit_s:4} s at most: {row.command}" for row in rows))
        return 0
    extra = ["--tiny"] if options.tiny else []
    if options.tiny:
        rows = [
            Row(row.command, 5 * row.limit_s) for row in rows
        ]  # because a CPU is slower than the model is small
    results: list[dict[str, Any]] = run(rows, options.out, options.budget_s, extra)
    print(f"\n{table(results, ['row', 'became', 'figure', 's'])}")
    return int(any(result["became"] != "ok" for result in results))


if __name__ == "__main__":
    sys.exit(main())
