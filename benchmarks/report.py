"""Turns the JSON lines of the other scripts into RESULTS.md: what was measured, and what follows
from it as said there.

Collect the lines with ``>> run.jsonl`` behind each script, then ``python benchmarks/report.py
run.jsonl``.
"""

import argparse
import sys
from pathlib import Path

from measure import Record, parse_records, table
from roofline import bounds_of

CEILING = "resident: compiled, chunked CE, no recompute"
RECOMPUTING = "resident: compiled, chunked CE, recompute"
HEAD = """# Results

Written by `benchmarks/report.py` from the JSON lines the other scripts printed; do not edit by \
hand.

Every row trains random weights of the shapes it names: {dtype}, AdamW, gradients clipped at \
{clipping}. tokens/s
counts every input token once, over the steps after the warm-up. All steps train on one batch of \
random tokens, so the
loss falls. GPU GB: peak allocated / reserved by torch after the warm-up. Host GB: peak
resident set of the process since it started, making the model included.
"""
BOUNDS = """
Lower bounds of a step's time, from the ceilings above: *compute* counts the matmuls (2 FLOP per \
parameter and token,
three times for full fine-tuning, twice with frozen weights) and causal attention, without any \
recompute; *weights up*
is each bf16 weight once; *gradients down* each trainable one once; *host AdamW* each trainable \
parameter once. One of
them alone bounds an asynchronous step; a synchronous step exposes most of the last one on top of \
the others.
"""
BOUND_NAMES = ["compute", "weights up", "gradients down", "host AdamW"]

TRACES = """
Seconds of a step, from the engine's own trace of two steps after the timed ones: how long a \
device's lanes and the
optimizer thread were busy. *Uneven*: by how much microbatches were computed longer than the \
fastest of their kind,
which is what they waited for inside. *Idle*: nothing was computed while weights came up, else \
while the optimizer ran,
else while gradients went down, else while nothing ran.
"""
TITLES = {
    "ceilings": "Ceilings",
    "optimizer": "The optimizer's pass",
    "host_memory": "Host memory of full fine-tuning",
    "moments": "Loss with optimizer state in fewer bits",
    "quickstart": "Quickstart",
    "loss_curve": "Loss against plain training",
    "steady": "Steady training",
    "max_length": "Longest sequences",
}


def _is_step(record: Record) -> bool:
    """Whether it is of a training step; the others are single figures."""
    return record["bench"] not in TITLES


def machine_of(record: Record) -> str:
    gpus = f"{record['num_gpus']} x {record['card']}" if record["num_gpus"] else "No GPU"
    return (
        f"{gpus}, {record['cpu_cores']} cores, torch {record['torch']}, "
        f"transformers {record['transformers']}, Python {record['python']}, {record['date']}"
    )


def settings_of(record: Record) -> str:
    """What a row was run with, beyond the shared workload."""
    shown = [f"{record['num_microbatch']} microbatches"]
    shown += [f"cap {record['cap_gb']:g} GB"] if record.get("cap_gb") is not None else []
    shown += [f"DeepSpeed {record['deepspeed']}"] if "deepspeed" in record else []
    if record["bench"] not in ("throughput", "trainer"):
        return ", ".join(shown)
    shown += [f"plan {record['plan']} (by {record['planned_by']})"]
    shown += ["compiled"] if record["compile"] else []
    shown += [f"{record['devices']} devices"] if record["devices"] > 1 else []
    shown += (
        [f"planned for {record['max_gpu_memory_gb']} GB"]
        if record["max_gpu_memory_gb"] is not None
        else []
    )
    shown += [
        f"grain {record['recompute_grain']}",
        f"pin {record['pin_model']}",
        f"{record['torch_threads']} threads",
    ]
    if "growth_gb" in record:
        shown.append(
            f"host memory grew by {record['growth_gb']:.2f} GB, {record['growth_of_base']:.1%} of "
            "the base"
        )
    return ", ".join(shown)


def _key(record: Record) -> tuple[object, ...]:
    """Two records with the same key did the same work."""
    return record["workload"], record["method"], record["tokens_per_step"]


def _work_of(record: Record) -> Record:
    rows = record["tokens_per_step"] // record["length"]
    return {
        "workload": record["workload"],
        "method": record["method"],
        "tokens": f"{rows} x {record['length']}",
    }


def step_row(record: Record, steps: list[Record]) -> Record:
    gpu = [
        record[name] for name in ("gpu_peak_allocated_gb", "gpu_peak_reserved_gb") if name in record
    ]
    return {
        **_work_of(record),
        "system": record["system"],
        "tokens/s": record["tokens_per_s"],
        "of ceiling": _share_of(CEILING, record, steps),
        "with recompute": _share_of(RECOMPUTING, record, steps),
        "step s": record["step_s"],
        "GPU GB": " / ".join(f"{peak:.1f}" for peak in gpu) or "-",
        "host GB": record["host_peak_rss_gb"],
        "loss first, last": f"{record['loss_first']:.3f}, {record['loss_last']:.3f}",
        "steps": record["steps"],
        "settings": settings_of(record),
    }


def _share_of(system: str, record: Record, steps: list[Record]) -> str:
    """The record's rate as a share of what ``system`` reached at the same work."""
    reached = [
        other["tokens_per_s"]
        for other in steps
        if other["system"] == system and _key(other) == _key(record)
    ]
    return f"{record['tokens_per_s'] / reached[-1]:.2f}" if reached else "-"


def trace_row(record: Record) -> Record:
    traced = record["trace"]
    idle = ("weights up", "optimizer", "gradients down", "nothing")
    return {
        **_work_of(record),
        "system": record["system"],
        "step s": traced["step_s"],
        "computing": traced["compute_s"],
        "uneven": traced["uneven_s"],
        "idle: weights, optimizer, gradients, nothing": ", ".join(
            f"{traced['idle_s'][name]:.3f}" for name in idle
        ),
        "up": traced["up_s"],
        "down": traced["down_s"],
        "optimizer": traced["optimizer_s"],
        "settings": settings_of(record),
    }


def bound_row(record: Record, rates: dict[str, float]) -> Record:
    """Seconds of one step; a bound whose rate was not measured is left open."""
    bounds = bounds_of(record, rates)
    return {**_work_of(record), **{f"{name} s": bounds.get(name, "-") for name in BOUND_NAMES}}


def section(machine: str, records: list[Record]) -> list[str]:
    """All of one machine: ceilings, steps, bounds."""
    lines = ["", f"## {machine}"]
    ceilings = [record for record in records if record["bench"] == "ceilings"]
    steps = [record for record in records if _is_step(record)]
    for bench, title in TITLES.items():
        own = [record for record in records if record["bench"] == bench]
        if own:
            lines += ["", f"### {title}", "", table(own, ["what", "value", "unit", "setting"])]
    if steps:
        steps.sort(key=lambda record: tuple(map(str, _key(record))))
        rows = [step_row(record, steps) for record in steps]
        of_what = f'*of ceiling*: against "{CEILING}"; *with recompute*: against "{RECOMPUTING}".'
        lines += ["", "### Steps", "", of_what, "", table(rows, list(rows[0]))]
        traces = [trace_row(record) for record in steps if "trace" in record]
        if traces:
            lines += ["", "### Where the time went", TRACES, table(traces, list(traces[0]))]
    if ceilings and steps:
        rates = {record["what"]: record["value"] for record in ceilings}
        bounds = {_key(record): bound_row(record, rates) for record in steps}
        lines += [
            "",
            "### Bounds",
            BOUNDS,
            table(list(bounds.values()), list(next(iter(bounds.values())))),
        ]
    return lines


def report(records: list[Record]) -> str:
    steps = [record for record in records if _is_step(record)]
    lines = []
    if steps:
        lines.append(HEAD.format(**steps[0]).rstrip())
    machines: dict[str, list[Record]] = {}
    for record in records:
        machines.setdefault(machine_of(record), []).append(record)
    for machine, own in machines.items():
        lines += section(machine, own)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what the scripts printed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "RESULTS.md")
    parser.add_argument(
        "--tiny", action="store_true", help="accept results of --tiny, which mean nothing"
    )
    options = parser.parse_args()
    records = [record for file in options.files for record in parse_records(file.read_text())]
    tiny = [record for record in records if record["workload"] == "tiny"]
    if not records or (tiny and not options.tiny):
        print(
            "no results in these files" if not records else "results of --tiny are no results",
            file=sys.stderr,
        )
        return 1
    options.output.write_text(report(records))
    print(f"{len(records)} results -> {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
