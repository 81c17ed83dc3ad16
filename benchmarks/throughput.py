"""RoundPipe on the shared workload: `wrap_model_to_roundpipe`, `forward_backward`, `step`, sync and async."""

import argparse
import os
import sys
from typing import Any

import measure
import torch
from torch import Tensor
from workload import (
    LEARNING_RATE,
    MAX_NORM,
    add_workload_options,
    describe,
    make_model,
    make_tokens,
    workload_of,
)

from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import AdamW, clip_grad_norm_

COLUMNS = [
    "method", "mode", "compile", "plan", "tokens_per_s", "step_s", "gpu_peak_allocated_gb", "host_peak_rss_gb",
    "loss_first", "loss_last",
]  # fmt: skip


def parse_plan(text: str) -> ModelExecutePlan:
    """A plan in the notation it prints in: ``F 0-8 | X 9-17 | B 0-8``."""
    stages: dict[str, list[range]] = {"F": [], "X": [], "B": []}
    for stage in text.split("|"):
        kind, span = stage.split()
        first, _, last = span.partition("-")
        stages[kind].append(range(int(first), int(last) + 1))
    return ModelExecutePlan(stages["F"], stages["X"] + stages["B"])


def run(options: argparse.Namespace) -> measure.Record:
    (mode,) = options.modes
    torch.set_num_threads(options.threads)
    workload = workload_of(options)
    model = make_model(workload, measure.compute_device()).cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    run_config = RoundPipeRunConfig(
        num_microbatch=options.num_microbatch,
        execute_plan=parse_plan(options.plan) if options.plan else None,
        recompute_grain=options.recompute_grain,
    )
    with wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        model_run_config=run_config,
        name=f"{workload.method}-{mode}",
        optim_dtype=torch.float32,
        pin_model=options.pin_model,
        devices=options.devices,
        compile=options.compile,
        max_gpu_memory=options.max_gpu_memory,
    ) as engine:
        optimizer = AdamW(engine.optim_parameters(), lr=LEARNING_RATE)
        tokens = make_tokens(workload)
        batch = {"input_ids": tokens, "labels": tokens}

        def update() -> None:
            clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()

        def step() -> Tensor:
            loss: Any = engine.forward_backward(input_kwargs=batch)
            engine.step(update, is_async=mode == "async")
            return loss

        timed = measure.time_steps(step, warmup=options.warmup, steps=options.steps)
        return {
            "bench": "throughput",
            "system": f"RoundPipe, {mode}",
            "mode": mode,
            "tokens_per_s": workload.tokens_per_step / timed["step_s"],
            "compile": options.compile,
            "plan": repr(engine.execute_plan).removeprefix("ModelExecutePlan(").removesuffix(")"),
            "planned_by": "hand" if options.plan else "engine",
            "recompute_grain": options.recompute_grain,
            "pin_model": options.pin_model,
            "devices": len(engine.devices),
            "max_gpu_memory_gb": options.max_gpu_memory,
            **describe(workload, model),
            **timed,
            **measure.peaks(),
            **measure.environment(),
        }


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_common_options(parser)
    add_workload_options(parser)
    parser.add_argument("--modes", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--plan", help="stages as they print: 'F 0-8 | X 9-17 | B 0-8' (default: planned)")
    parser.add_argument("--recompute-grain", choices=["stage", "layer"], default="stage")
    parser.add_argument("--pin-model", choices=["alloc", "register", "off"], default="alloc")
    parser.add_argument("--devices", type=int, help="virtual CPU devices (default: every GPU, else one)")
    parser.add_argument("--max-gpu-memory", type=float, metavar="GB", help="stay under this much on each GPU")
    parser.add_argument(
        "--threads", type=int, default=max(1, cores * 3 // 4), help="host threads (default 3/4 of cores)"
    )
    options = parser.parse_args()
    rows = [(method, mode) for method in options.methods for mode in options.modes]
    if len(rows) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice behind them.
        return measure.run_rows([[*sys.argv[1:], "--methods", a, "--modes", b] for a, b in rows], COLUMNS)
    return measure.run_row(run(options), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
