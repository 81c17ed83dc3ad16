"""Engines of some of a program's processes, whose groups have processes in common."""

import gc
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import roundpipe
from tests.params.test_device_link import link_virtual_devices
from tests.support.models import make_mlp, mlp_batch
from tests.support.processes import check_in_processes, threads_of_gloo


@pytest.mark.parametrize("way", ["hosts", "devices"])
def test_groups_that_overlap(way: str, tmp_path: Path) -> None:
    check_in_processes(partial(two_pairs, way), tmp_path, 3)


def two_pairs(way: str) -> None:
    """The second process is in both, so it has made more groups than the others have. By their
    number torch names a group of some processes, and so these never met. Each pair equals plain
    PyTorch on the rows of both, again after it was closed, of which no thread is left."""
    dist.init_process_group("gloo")
    sent = link_virtual_devices() if way == "devices" else None
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    counts = set()
    for _ in range(3):
        for number, pair in enumerate(pairs):
            if dist.get_rank() in (number, number + 1):
                trains_as_plain(pair, number)
        gc.collect()
        counts.add(len(threads_of_gloo()))
    assert len(counts) == 1, counts
    assert sent != [], "nothing went through devices"


def trains_as_plain(pair: dist.ProcessGroup, seed: int) -> None:
    batch, plain, model = mlp_batch(4, seed), make_mlp(), make_mlp()
    batch.loss_fn(plain(*batch.args), batch.label).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    rows = slice(2 * dist.get_rank(pair), 2 * dist.get_rank(pair) + 2)
    with roundpipe.RoundPipe(model, devices=1, process_group=pair) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        engine.forward_backward(
            (batch.args[0][rows],), label=batch.label[rows], loss_fn=batch.loss_fn
        )
        engine.step(optimizer.step, is_async=False)
    torch.testing.assert_close(
        list(model.parameters()), list(plain.parameters()), atol=1e-6, rtol=0
    )
