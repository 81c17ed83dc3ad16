"""Minutes of steady training: host and GPU memory after the warm-up and at the end. Fails if there
was growth.

Memory is looked at between steps, with no work under way: pages of the process that are no file's,
what torch has allocated and reserved on all GPUs, and how often its allocator had to give memory
back and try again. Where optimizer state moves to a GPU after all, because updates have turned out
too slow, the time begins again.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import measure
import torch
from engine import Training, add_engine_options, settings_of, training
from workload import add_workload_options, describe, make_tokens, workload_of

COLUMNS = ["what", "value", "unit", "setting"]
LOOKS = 8  # between the warm-up and the end, for the record
TOLERATED_MB = 64


class Footprint(NamedTuple):
    """Bytes, and a count since the process began. ``on_device``: of optimizer state on GPUs, and of
    weights there."""

    on_device: int
    host: int
    allocated: int
    reserved: int
    retries: int


def footprint(trained: Training) -> Footprint:
    trained.engine.synchronize()
    measure.wait_device()
    cards = range(torch.cuda.device_count())
    statistics = [torch.cuda.memory_stats(card) for card in cards]
    return Footprint(
        on_device=trained.engine.statistics()["device_state_bytes"],
        host=_host_bytes(),
        allocated=sum(torch.cuda.memory_allocated(card) for card in cards),
        reserved=sum(torch.cuda.memory_reserved(card) for card in cards),
        retries=sum(of_card.get("num_alloc_retries", 0) for of_card in statistics),
    )


def _host_bytes() -> int:
    """Pages of this process that are no file's, page-locked ones among them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem"))


def run(options: argparse.Namespace) -> list[measure.Record]:
    (mode,) = options.modes
    workload = workload_of(options)
    tokens = make_tokens(workload)
    with training(workload, mode, options) as trained:
        for _ in range(options.warmup):
            trained.step(tokens)
        looks, steps, began = [footprint(trained)], 0, time.monotonic()
        while len(looks) <= LOOKS:
            while time.monotonic() - began < 60 * options.minutes * len(looks) / LOOKS:
                trained.step(tokens)
                steps += 1
            now = footprint(trained)
            if now.on_device == looks[0].on_device:
                looks.append(now)
            else:
                looks, steps, began = [now], 0, time.monotonic()
        elapsed_s = time.monotonic() - began
        about = describe(workload, trained.model) | settings_of(trained, options)
    first, last = looks[0], looks[-1]
    shared = {
        "bench": "steady",
        "setting": (
            f"{about['workload']}, {about['method']}, {mode}: "
            f"{steps} steps in {elapsed_s / 60:.1f} minutes"
        ),
        **about,
        "mode": mode,
        "warmup": options.warmup,
        "steps": steps,
        "step_s": elapsed_s / max(steps, 1),
        **measure.environment(),
    }
    figures = [
        ("growth of host memory", (last.host - first.host) / 1e6, "MB", TOLERATED_MB),
        (
            "growth of GPU memory, allocated",
            (last.allocated - first.allocated) / 1e6,
            "MB",
            TOLERATED_MB,
        ),
        (
            "growth of GPU memory, reserved",
            (last.reserved - first.reserved) / 1e6,
            "MB",
            TOLERATED_MB,
        ),
        ("allocator retries", last.retries - first.retries, "", 0),
    ]
    records = [
        {"what": what, "value": value, "unit": unit, "limit": limit, **shared}
        for what, value, unit, limit in figures
    ]
    records[0]["looks"] = [look._asdict() for look in looks]
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_machine_options(parser)
    add_workload_options(parser)
    add_engine_options(parser)
    parser.add_argument("--modes", nargs=1, choices=["sync", "async"], default=["async"])
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--warmup", type=int, default=20, help="steps before the first look (default 20)"
    )
    options = parser.parse_args()
    records = run(options)
    for record in records:
        measure.emit(record)
    print(f"\n{measure.table(records, COLUMNS)}")
    return int(any(record["value"] > record["limit"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
