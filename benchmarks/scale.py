"""One engine on some of a host's GPUs, at several numbers of tokens a step: tokens/s, and the share
of time that devices do not compute beside what the planner expects.

    python benchmarks/scale.py --compile --devices 2 --tokens 65536 262144 1048576

A microbatch has the same shape in all of them.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any

import measure
import roofline
from engine import Training, add_engine_options, settings_of, training
from on_paper import computed_ms
from workload import Workload, add_workload_options, describe, make_tokens, workload_of

from roundpipe.plan.best import step_ms

COLUMNS = [
    "method", "mode", "devices", "tokens_per_step", "tokens_per_s", "step_s", "plan",
    "idle_pct", "predicted_idle_pct", "gpu_peak_allocated_gb", "host_peak_rss_gb", "loss_last",
]  # fmt: skip
# Steps of more take so long that few of them say as much, and that a trace, three steps more, takes
# minutes.
LONG_TOKENS = 500_000


def predicted_idle(trained: Training) -> float:
    """Returns the share of devices' time without compute that the planner expects, at the layers'
    measured times."""
    costs, problem = trained.engine.planning_problem("fused")
    problem = replace(problem, overlaps=trained.is_async, optimizer_ms=0.0)
    plan = trained.engine.execute_plan
    computed = problem.num_microbatches * computed_ms(plan, costs) / problem.num_devices
    return 1 - computed / step_ms(plan, "fused", costs, problem)


def run(workload: Workload, options: argparse.Namespace) -> measure.Record:
    tokens = make_tokens(workload)
    with training(workload, options.mode, options) as trained:
        is_long = workload.tokens_per_step > LONG_TOKENS
        timed = measure.time_steps(
            lambda: trained.step(tokens),
            warmup=min(options.warmup, 2) if is_long else options.warmup,
            steps=min(options.steps, 2) if is_long else options.steps,
        )
        record: dict[str, Any] = {
            "bench": "scale",
            "system": f"RoundPipe, {options.mode}",
            "mode": options.mode,
            "tokens_per_s": workload.tokens_per_step / timed["step_s"],
            **settings_of(trained, options),
            **describe(workload, trained.model),
            **timed,
            **measure.peaks(),
            **measure.environment(),
            "predicted_idle_pct": 100 * predicted_idle(trained),
        }
        if workload.tokens_per_step <= LONG_TOKENS:
            record["trace"] = traced = roofline.trace(trained, tokens)
            record["idle_pct"] = 100 * (1 - traced["compute_s"] / traced["step_s"])
    return record


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    add_engine_options(parser)
    parser.add_argument("--mode", choices=["sync", "async"], default="async")
    parser.add_argument("--tokens", nargs="+", type=int, default=[65536, 262144, 1048576])
    parser.add_argument("--microbatch-rows", type=int, default=4)
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.length, options.microbatch_rows = [128, 256], 16, 2
    records = []
    for tokens in options.tokens:
        options.rows = tokens // options.length
        options.num_microbatch = max(1, options.rows // options.microbatch_rows)
        records.append(run(workload_of(options), options))
        measure.emit(records[-1])
    print(measure.table(records, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
