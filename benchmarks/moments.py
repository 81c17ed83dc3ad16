"""Loss curves of low-precision optimizer state against fp32: SmolLM2-135M, all of it trained, on
the same rows.

    python benchmarks/moments.py --steps 60

For each option: held-out loss every few steps, bytes per parameter (masters and moments, as
allocated), seconds per step. Every option starts from the same bf16 weights and sees the same rows
in the same order.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import measure
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from fetch_assets import smollm2_folder
from quickstart import short_rows
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import AdamW, LeanAdamW, clip_grad_norm_

LEARNING_RATE = 2e-5
HELD_OUT = 24  # rows
IGNORED = -100
RUN = RoundPipeRunConfig(num_microbatch=2)

Make = Callable[[Any], torch.optim.Optimizer]


class Option(NamedTuple):
    name: str
    masters: torch.dtype
    make: Make


def lean(moments: Any) -> Make:
    return lambda params: LeanAdamW(params, lr=LEARNING_RATE, moments=moments)


OPTIONS = [
    Option(
        "AdamW, fp32 masters and moments",
        torch.float32,
        lambda params: AdamW(params, lr=LEARNING_RATE),
    ),
    Option("fp32 masters, bf16 moments", torch.float32, lean(torch.bfloat16)),
    Option("fp32 masters, 8-bit moments", torch.float32, lean("8bit")),
    Option("bf16 masters, fp32 moments", torch.bfloat16, lean(torch.float32)),
    Option("bf16 masters, bf16 moments", torch.bfloat16, lean(torch.bfloat16)),
    Option("bf16 masters, 8-bit moments", torch.bfloat16, lean("8bit")),
]


def token_mean(outputs: Any, labels: Tensor, num_tokens: int) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    total = torch.nn.functional.cross_entropy(
        logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / num_tokens


def num_valid(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def train_on(engine: RoundPipe, batch: dict[str, Tensor]) -> None:
    count = num_valid(batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    engine.forward_backward(
        (),
        inputs,
        label=batch["labels"],
        loss_fn=lambda out, labels: token_mean(out, labels, count),
        run_config=RUN,
    )


def held_out_loss(engine: RoundPipe, batches: Iterable[dict[str, Tensor]]) -> float:
    total = tokens = 0.0
    with torch.no_grad():
        for batch in batches:
            count = num_valid(batch)
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            outputs = engine(**inputs, roundpipe_run_config=RUN)
            total += float(token_mean(outputs, batch["labels"], count)) * count
            tokens += count
    return total / tokens


def state_bytes(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> float:
    """Masters and all tensors of the optimizer's state, per parameter."""
    masters = engine.optim_parameters()
    state = [
        value
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return sum(tensor.nbytes for tensor in [*masters, *state]) / sum(
        master.numel() for master in masters
    )


def run(
    option: Option, train: list[Any], held_out: list[Any], every: int, devices: int | None
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.bfloat16)
    with wrap_model_to_roundpipe(
        model, use_sequential_preset=True, optim_dtype=option.masters, devices=devices
    ) as engine:
        optimizer = option.make(engine.optim_parameters())

        def step_fn() -> None:
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        losses, seconds = [held_out_loss(engine, held_out)], 0.0
        for index, batch in enumerate(train, start=1):
            began = time.perf_counter()
            train_on(engine, batch)
            engine.step(step_fn, is_async=False)
            engine.synchronize()
            seconds += time.perf_counter() - began
            if index % every == 0:
                losses.append(held_out_loss(engine, held_out))
        size = state_bytes(engine, optimizer)
    curve = ", ".join(f"{loss:.4f}" for loss in losses[:-1])
    steps = (
        f"after {len(train)} steps of {len(train[0]['labels'])} rows; every {every} before: {curve}"
    )
    measure.emit(
        {
            "bench": "moments", "what": option.name, "value": losses[-1], "unit": "held-out loss",
            "setting": f"{steps}; {size:.2f} bytes per parameter; "
            f"{seconds / len(train):.2f} s per step",
            "workload": "SmolLM2-135M", **measure.environment(),
        }
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="optimizer steps per option (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=8, help="in a step (default: %(default)s)")
    parser.add_argument(
        "--points", type=int, default=4, help="held-out losses per curve (default: %(default)s)"
    )
    parser.add_argument(
        "--devices", type=int, help="the first so many GPUs; without a GPU: virtual devices"
    )
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the options to run, from 0")
    chosen = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    collate = DataCollatorForSeq2Seq(tokenizer)
    rows = short_rows(tokenizer, HELD_OUT + chosen.steps * chosen.rows)
    held_out, train = (
        [dict(collate(some[at : at + chosen.rows])) for at in range(0, len(some), chosen.rows)]
        for some in (rows[:HELD_OUT], rows[HELD_OUT:])
    )
    every = max(1, chosen.steps // chosen.points)
    for number, option in enumerate(OPTIONS):
        if chosen.only is None or number in chosen.only:
            run(option, train, held_out, every, chosen.devices)


if __name__ == "__main__":
    main()
