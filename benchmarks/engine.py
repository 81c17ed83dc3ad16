"""RoundPipe on the shared workload: `wrap_model_to_roundpipe`, `forward_backward`, `step`; its
options, one engine.

Knows nothing of what is measured.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import measure
import torch
from torch import Tensor, nn
from workload import LEARNING_RATE, MAX_NORM, Workload, make_model

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import AdamW, LeanAdamW, clip_grad_norm_
from roundpipe.system.cores import usable_cores


class Training(NamedTuple):
    """An engine and what takes its steps. Used by the thread that made it."""

    model: nn.Module
    engine: RoundPipe
    optimizer: torch.optim.Optimizer
    is_async: bool

    def step(self, tokens: Tensor) -> Tensor:
        """One step on ``tokens`` (rows, length); its loss, a mean over predictions at the weights
        before it."""
        loss: Tensor = self.engine.forward_backward(input_kwargs=inputs_of(tokens))
        self.engine.step(self.update, is_async=self.is_async)
        return loss

    def update(self) -> None:
        clip_grad_norm_(self.optimizer, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


def inputs_of(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "labels": tokens}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    cores = usable_cores()
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--compute-dtype", choices=["fp8"], help="what the blocks' linear layers multiply in"
    )
    parser.add_argument(
        "--plan", help="stages as they print: 'F 0-8 | X 9-17 | B 0-8' (default: planned)"
    )
    parser.add_argument(
        "--state",
        choices=["fp32", "bf16", "8bit"],
        default="fp32",
        help="of the optimizer: fp32 masters and moments, or bf16 masters with such moments",
    )
    parser.add_argument("--recompute-grain", choices=["stage", "layer"], default="stage")
    parser.add_argument(
        "--tokens-at-once",
        type=int,
        help="what MLPs and norms run for, 0 for all (default: as the planner finds it needed)",
    )
    parser.add_argument("--max-host-gb", type=float, help="max_host_memory of the engine")
    parser.add_argument("--pin-model", choices=["alloc", "register", "off"], default="alloc")
    parser.add_argument(
        "--devices", type=int, help="the first so many GPUs; without a GPU: virtual devices"
    )
    parser.add_argument(
        "--max-gpu-memory", type=float, metavar="GB", help="stay under this much on each GPU"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, cores * 3 // 4),
        help="host threads (default 3/4 of cores)",
    )


@contextmanager
def training(
    workload: Workload,
    mode: str,
    options: argparse.Namespace,
    learning_rate: float = LEARNING_RATE,
    process_group: Any = None,
) -> Iterator[Training]:
    """``mode``: sync or async; ``options``: those of ``add_engine_options`` and the machine's."""
    torch.set_num_threads(options.threads)
    model = make_model(workload, measure.compute_device()).cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # Not before, because a model larger than the limit is made on the GPU as well.
    measure.cap_gpu_memory(options.cap_gb)
    engine: Any = wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        model_run_config=RoundPipeRunConfig(
            num_microbatch=workload.num_microbatch,
            execute_plan=parse_plan(options.plan) if options.plan else None,
            recompute_grain=options.recompute_grain,
            tokens_at_once=options.tokens_at_once,
        ),
        name=f"{workload.method}-{mode}",
        optim_dtype=torch.float32 if options.state == "fp32" else torch.bfloat16,
        pin_model=options.pin_model,
        devices=_devices(options.devices),
        compile=options.compile,
        compute_dtype=options.compute_dtype,
        max_gpu_memory=_limit(options),
        process_group=process_group,
        max_host_memory=options.max_host_gb,
    )
    with engine:
        moments: Any = torch.bfloat16 if options.state == "bf16" else options.state
        kind: Any = AdamW if options.state == "fp32" else partial(LeanAdamW, moments=moments)
        optimizer = kind(engine.optim_parameters(), lr=learning_rate)
        yield Training(model, engine, optimizer, mode == "async")


def settings_of(training: Training, options: argparse.Namespace) -> measure.Record:
    """What a record says of the engine, as it is now."""
    return {
        "compile": options.compile,
        "compute_dtype": options.compute_dtype,
        "plan": plan_of(training.engine),
        "planned_by": "hand" if options.plan else "engine",
        "recompute_grain": options.recompute_grain,
        "tokens_at_once": options.tokens_at_once,
        "state": options.state,
        "pin_model": options.pin_model,
        "devices": len(training.engine.devices),
        "max_gpu_memory_gb": options.max_gpu_memory,
        "cap_gb": options.cap_gb,
    }


def plan_of(engine: RoundPipe) -> str:
    return repr(engine.execute_plan).removeprefix("ModelExecutePlan(").removesuffix(")")


def parse_plan(text: str) -> ModelExecutePlan:
    """A plan in the notation it prints in: ``F 0-8 | X 9-17 | B 0-8 x2``."""
    stages: dict[str, list[range]] = {"F": [], "X": [], "B": []}
    for stage in text.split("|"):
        kind, span, *times = stage.split()
        first, _, last = span.partition("-")
        num_shares = int(times[0].removeprefix("x")) if times else 1
        stages[kind] += [range(int(first), int(last) + 1)] * num_shares
    return ModelExecutePlan(stages["F"], stages["X"] + stages["B"])


def _devices(count: int | None) -> Any:
    return (
        count
        if count is None or not torch.cuda.is_available()
        else [f"cuda:{index}" for index in range(count)]
    )


def _limit(options: argparse.Namespace) -> float | None:
    """What the planner is told. Of a GPU it sees the cap itself; a virtual device has only this to
    go by."""
    limit: float | None = options.max_gpu_memory
    if options.cap_gb is not None and not torch.cuda.is_available():
        limit = options.cap_gb
    return limit
