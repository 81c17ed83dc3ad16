"""Loss over many steps, RoundPipe (synchronous) against plain training with resident weights: same
seed, same batches.

Plain is Hugging Face's own forward and loss (all the logits), bf16 weights, gradients of
microbatches summed in fp32, AdamW on fp32 masters, all on one device. Fails where the losses differ
by more than stated. How far bf16 training wanders by itself is shown by plain training once more,
with the rows of a step cut into twice as many microbatches: the same sums, rounded elsewhere.
"""

import argparse
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace

import measure
import torch
from engine import add_engine_options, inputs_of, settings_of, training
from resident import MasterOptimizer, hugging_face_loss
from torch import Tensor
from workload import (
    LEARNING_RATE,
    Workload,
    add_workload_options,
    describe,
    make_batches,
    make_model,
    workload_of,
)

COLUMNS = ["what", "value", "unit", "setting"]
STEP_LIMIT, FINAL_LIMIT = 0.5, 0.1  # percent
EVALUATED = 4  # batches


def plain(
    workload: Workload, batches: list[Tensor], held_out: list[Tensor], learning_rate: float
) -> Iterator[float]:
    """The loss of each step, then that of the held-out batches after all steps."""
    device = measure.compute_device()
    model = make_model(workload, device)
    loss_of = hugging_face_loss(model, workload.predictions_per_step)
    optimizer = MasterOptimizer(model, learning_rate)
    for batch in batches:
        total = torch.zeros((), device=device)
        for tokens in batch.to(device).chunk(workload.num_microbatch):
            loss = loss_of(tokens)
            loss.backward()
            optimizer.take_gradients()
            total += loss.detach()
        optimizer.step()
        yield float(total)
    with torch.no_grad():
        losses = [
            loss_of(tokens)
            for batch in held_out
            for tokens in batch.to(device).chunk(workload.num_microbatch)
        ]
    yield float(torch.stack(losses).sum()) / len(held_out)


def ours(
    workload: Workload, batches: list[Tensor], held_out: list[Tensor], options: argparse.Namespace
) -> tuple[list[float], measure.Record]:
    """As `plain`, and what the engine was set to."""
    with training(workload, "sync", options, options.learning_rate) as trained:
        losses = [float(trained.step(batch)) for batch in batches]
        evaluated = [
            float(trained.engine.forward_loss(input_kwargs=inputs_of(batch))) for batch in held_out
        ]
        record = describe(workload, trained.model) | settings_of(trained, options)
    return [*losses, sum(evaluated) / len(evaluated)], record


def run(options: argparse.Namespace) -> list[measure.Record]:
    workload = workload_of(options)
    data = make_batches(workload, options.steps, seed=1), make_batches(workload, EVALUATED, seed=2)
    expected = list(plain(workload, *data, options.learning_rate))
    gc.collect()  # of the plain run nothing is to be left on the device
    found, about = ours(workload, *data, options)
    gc.collect()
    finer = replace(workload, num_microbatch=2 * workload.num_microbatch)
    percent = _differences(found, expected)
    by_itself = _differences(list(plain(finer, *data, options.learning_rate)), expected)
    setting = (
        f"{options.steps} steps of {workload.rows} x {workload.length}, "
        f"loss {expected[0]:.2f} to {expected[-2]:.2f}"
    )
    shared = {
        "bench": "loss_curve",
        "unit": "%",
        **about,
        "steps": options.steps,
        **measure.environment(),
    }
    name = f"{about['workload']}, {about['method']}"
    return [
        {
            "what": f"largest difference at any step: {name}", "value": max(percent[:-1]),
            "limit": STEP_LIMIT, "setting": setting, **shared,
            "losses_plain": expected[:-1], "losses": found[:-1],
        },
        {
            "what": f"difference of the held-out loss: {name}", "value": percent[-1],
            "limit": FINAL_LIMIT,
            "setting": f"after these steps: {found[-1]:.4f}, plain {expected[-1]:.4f}", **shared,
        },
        {
            "what": f"of plain training from itself, at any step: {name}",
            "value": max(by_itself[:-1]),
            "setting": f"{finer.num_microbatch} microbatches against {workload.num_microbatch}",
            **shared,
        },
        {
            "what": f"of plain training from itself, held out: {name}", "value": by_itself[-1],
            "setting": f"{finer.num_microbatch} microbatches against {workload.num_microbatch}",
            **shared,
        },
    ]  # fmt: skip


def _differences(losses: list[float], expected: list[float]) -> list[float]:
    """Percent."""
    return [100 * abs(one - other) / other for one, other in zip(losses, expected, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    measure.add_machine_options(parser)
    add_workload_options(parser)
    add_engine_options(parser)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.set_defaults(model="llama-3.2-1b", layers=6, rows=8, length=512)
    options = parser.parse_args()
    if len(options.methods) > 1:
        # argparse lets the last one win, so a row is this call's own arguments and its choice
        # behind them.
        return measure.run_rows(
            [[*sys.argv[1:], "--methods", method] for method in options.methods], COLUMNS
        )
    records = run(options)
    for record in records:
        measure.emit(record)
    print(f"\n{measure.table(records, COLUMNS)}")
    return int(any(record["value"] > record.get("limit", record["value"]) for record in records))


if __name__ == "__main__":
    sys.exit(main())
