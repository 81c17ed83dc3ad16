"""Train one model in several processes, each with a pipeline over its own devices.

    torchrun --nproc-per-node 2 examples/multinode/train.py             # two on this machine
    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/multinode/train.py                                     # on each of four
    sbatch examples/multinode/job.slurm

Start it again with the same command, also on another number of machines, and it goes on from its
checkpoint, which has to be in a folder that all machines see.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipe

ROWS, WIDTH = 64, 32


def main(argv: list[str] | None = None) -> list[float]:
    """Returns the losses of the steps taken now, over all rows of all processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="in all (default: %(default)s)")
    parser.add_argument("--save-steps", type=int, default=10, help="between two checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("outputs/multinode.safetensors"))
    parser.add_argument("--virtual", type=int, help="virtual CPU devices; default: every GPU")
    options = parser.parse_args(argv)
    if options.save_steps < 1:
        parser.error(f"--save-steps is {options.save_steps}; give at least 1")
    if "RANK" not in os.environ:
        parser.error("start it by torchrun, as --help says")
    # A process that hangs is given up after the timeout; one that ends, at once.
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    devices = None if options.virtual is None else roundpipe.virtual(options.virtual)
    losses = []
    with RoundPipe(
        make_model(), torch.float32, devices=devices, process_group=dist.group.WORLD
    ) as engine:
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
        first = 0
        # The first one says so for all, because a shared folder may be seen late elsewhere.
        is_there = [options.checkpoint.exists()]
        dist.broadcast_object_list(is_there)
        if is_there[0]:
            roundpipe.load_checkpoint(options.checkpoint, engine, optimizer)
            first = int(engine.model.get_buffer("step"))
            if rank == 0:
                print(f"{options.checkpoint}: {first} of {options.steps} steps done", flush=True)

        def update() -> None:
            roundpipe.clip_grad_norm_(optimizer, 1.0)  # the norm of all processes' gradients
            optimizer.step()
            optimizer.zero_grad()

        for step in range(first, options.steps):
            inputs, targets = batch_of(step)
            own = slice(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
            loss = engine.forward_backward((inputs[own],), label=targets[own], loss_fn=loss_of_all)
            engine.step(update)
            dist.all_reduce(loss)
            losses.append(float(loss))
            if rank == 0:
                print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
            if (step + 1) % options.save_steps == 0 or step + 1 == options.steps:
                engine.model.get_buffer("step").fill_(step + 1)
                options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
                roundpipe.save_checkpoint(options.checkpoint, engine, optimizer)  # all call it
    dist.destroy_process_group()
    return losses


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers)
    model.register_buffer("step", torch.zeros((), dtype=torch.int64))
    return model


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The rows of all processes; each trains on its own of them."""
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.flip(1)


def loss_of_all(outputs: Tensor, targets: Tensor) -> Tensor:
    """The engine sums over processes, so this divides by the rows of all."""
    return (outputs - targets).square().sum() / ROWS


if __name__ == "__main__":
    main()
