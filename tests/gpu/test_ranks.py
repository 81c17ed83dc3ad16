"""Processes with a GPU each, started as torchrun starts them, train as one process with all GPUs.

Their group is NCCL's, so what is large goes from device to device ([Note: device links]).
"""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import roundpipe
from tests.support.models import make_mlp, mlp_batch
from tests.support.processes import check_in_processes, run_in_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
WIDTH, ROWS, STEPS, RATE = 1024, 16, 4, 1e-3  # a layer's 4 MiB of gradients go through devices


def test_two_ranks_are_one_process_with_two_devices(tmp_path: Path) -> None:
    check_in_processes(trains_as_one, tmp_path)


def join() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    return rank


def trains_as_one() -> None:
    """fp32 to what kernels of other batch sizes differ by; bf16 to a few roundings of gradients,
    which AdamW turns into steps of at most its rate."""
    rank = join()
    for dtype, losses_within, weights_within in (
        (torch.float32, 1e-4, 1e-5),
        (torch.bfloat16, 2e-2, 2 * RATE * STEPS + 2**-8),
    ):
        for is_async in (False, True):
            alone = trained(dtype, None, is_async=is_async)
            together = trained(dtype, dist.group.WORLD, is_async=is_async, own_device=rank)
            torch.testing.assert_close(together[0], alone[0], rtol=losses_within, atol=0)
            torch.testing.assert_close(together[1], alone[1], rtol=1e-4, atol=weights_within)
            for weight in together[1]:
                first = weight.cuda()
                dist.broadcast(first, 0)
                assert torch.equal(first.cpu(), weight), "ranks have other weights"
    dist.destroy_process_group()


def trained(
    dtype: torch.dtype, group: object, *, is_async: bool, own_device: int | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of whole batches, and the weights. The microbatches are the same in both."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    model = make_mlp(width=WIDTH).to(dtype)
    losses = []
    with roundpipe.RoundPipe(
        model,
        torch.float32,
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=4 // ranks),
        process_group=group,
    ) as engine:
        if group is not None:
            assert [device.name for device in engine.devices] == [f"cuda:{own_device}"]
            assert engine.ranks.sends_by_device
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=RATE)
        own = slice(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
        for step in range(STEPS):
            batch = mlp_batch(ROWS, step, WIDTH)
            loss = engine.forward_backward(
                (batch.args[0][own].to(dtype),),
                label=batch.label[own],
                loss_fn=lambda out, label, loss_fn=batch.loss_fn: loss_fn(out.float(), label),
                is_last=True,
            ).cuda()
            engine.step(optimizer.step, is_async)
            if group is not None:
                dist.all_reduce(loss)
            losses.append(float(loss))
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def test_one_that_is_killed_is_named(tmp_path: Path) -> None:
    """Long before NCCL's timeout, which would end the process without a word of ours."""
    ended = run_in_processes(one_is_killed, tmp_path)
    assert [code for code, _ in ended] == [1, -signal.SIGKILL], "\n".join(t for _, t in ended)
    assert "lost rank 1" in ended[0][1]


def one_is_killed() -> None:
    rank = join()
    engine = roundpipe.RoundPipe(make_mlp(width=WIDTH), process_group=dist.group.WORLD)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters())
    batch = mlp_batch(ROWS, 0, WIDTH)
    for step in range(3):
        if (step, rank) == (2, 1):
            engine.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.forward_backward(batch.args, loss_fn=lambda out, _: out.sum(), is_last=True)
        engine.step(optimizer.step, is_async=False)
