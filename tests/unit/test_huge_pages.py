"""Masters and moments lie in large pages where the system has them."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import nn

from device_sets import ONE
from engines import Engines, run_batch
from models import Batch
from roundpipe import load_checkpoint, save_checkpoint
from roundpipe.memory import huge_pages
from roundpipe.optim import SGD, AdamW

MAPS = Path("/proc/self/smaps")
WIDTH = 2048  # 16 MiB of fp32


def asks_for_large_pages(tensor: torch.Tensor) -> bool:
    """Whether the memory in the tensor's middle is marked so."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in MAPS.read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(address, 16) for address in first.split("-"))
            inside = start <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("the tensor lies in no mapping")


@pytest.fixture
def has_large_pages() -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE") or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no large pages to ask for")


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 1 << 20), (1 << 21, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_memory_as_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_pages.zeros(shape, dtype)
    torch.testing.assert_close(tensor, torch.zeros(shape, dtype=dtype), rtol=0, atol=0)
    assert type(tensor) is torch.Tensor


@pytest.mark.usefixtures("has_large_pages")
def test_masters_and_moments_lie_in_large_pages_also_after_a_resume(tmp_path: Path, engines: Engines) -> None:
    batch = Batch((torch.ones(1, WIDTH),), {}, torch.zeros(1, WIDTH), lambda out, target: (out - target).square().sum())
    for make, names in ((AdamW, ["exp_avg", "exp_avg_sq"]), (SGD, ["momentum_buffer"])):
        settings = {"momentum": 0.9} if make is SGD else {}
        first, second = (engines(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), ONE) for _ in range(2))
        optimizer, resumed = (make(each.optim_parameters(), lr=0.1, **settings) for each in (first, second))
        run_batch(first, batch, 1)
        first.step(optimizer.step, is_async=False)
        save_checkpoint(tmp_path / "saved", first, optimizer)
        load_checkpoint(tmp_path / "saved", second, resumed)
        for engine, stepped in ((first, optimizer), (second, resumed)):
            [master] = engine.optim_parameters()
            assert [asks_for_large_pages(stepped.state[master][name]) for name in names] == [True] * len(names)
            assert asks_for_large_pages(master)
