"""RoundPipe on the shared workload, synchronous and asynchronous: tokens per second, peaks, and
where the time went."""

import argparse
import sys
from functools import partial

import measure
import roofline
from engine import add_engine_options, settings_of, training
from workload import add_workload_options, describe, make_tokens, workload_of

COLUMNS = [
    "method", "mode", "compile", "compute_dtype", "plan", "tokens_per_s", "step_s",
    "gpu_peak_allocated_gb", "host_peak_rss_gb", "loss_first", "loss_last",
]  # fmt: skip


def run(options: argparse.Namespace) -> measure.Record:
    (mode,) = options.modes
    workload = workload_of(options)
    tokens = make_tokens(workload)
    with training(workload, mode, options) as trained:
        timed = measure.time_steps(
            lambda: trained.step(tokens), warmup=options.warmup, steps=options.steps
        )
        record = {
            "bench": "throughput",
            "system": f"RoundPipe, {mode}",
            "mode": mode,
            "tokens_per_s": workload.tokens_per_step / timed["step_s"],
            **settings_of(trained, options),
            **describe(workload, trained.model),
            **timed,
            **measure.peaks(),
            **measure.environment(),
        }
        return record | {"trace": roofline.trace(trained, tokens)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    measure.add_machine_options(parser)
    add_workload_options(parser)
    add_engine_options(parser)
    parser.add_argument("--modes", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    options = parser.parse_args()
    comment = partial(roofline.line, rates=roofline.rates_of(options.ceilings))
    rows = [(method, mode) for method in options.methods for mode in options.modes]
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--methods", a, "--modes", b] for a, b in rows], COLUMNS, comment
        )
    return measure.run_row(run(options), COLUMNS, comment)


if __name__ == "__main__":
    sys.exit(main())
