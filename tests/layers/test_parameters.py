"""A first forward's writes are found by sums over the weights' bytes, which once made eight bytes
of every element: 4 GiB of a head of 128 K x 4096 in bf16, on a device that had room for the head
only."""

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from roundpipe.layers.parameters import sum_of_bytes

DTYPES = [torch.bfloat16, torch.float32, torch.complex64, torch.uint8, torch.float8_e4m3fn]


def weight_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes."""
    torch.manual_seed(0)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    real = torch.view_as_real(weight) if weight.is_complex() else weight
    yield from real.view(-1).view(torch.uint8).split(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_takes_no_memory_that_grows_with_the_weight(dtype: torch.dtype) -> None:
    weight = weight_of(dtype, 300, 101)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        sum_of_bytes(weight)
    most = max(event.cpu_memory_usage for event in profiled.events())
    assert most < 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (1,), ()], ids=str)
def test_every_byte_counts(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = weight_of(dtype, *shape)
    before = sum_of_bytes(weight).item()
    for byte in bytes_of(weight):
        byte.add_(1)
        assert sum_of_bytes(weight).item() != before
        byte.sub_(1)
    assert sum_of_bytes(weight).item() == before


def test_other_memory_may_lie_anywhere() -> None:
    """Such as a layer's code puts under a parameter by ``.data``."""
    weight = weight_of(torch.bfloat16, 7, 5)
    elsewhere = torch.zeros(41, dtype=torch.bfloat16)[3:38].view(7, 5)
    elsewhere.copy_(weight)
    assert sum_of_bytes(elsewhere) == sum_of_bytes(weight)
    assert sum_of_bytes(weight.mT) == sum_of_bytes(weight.mT.contiguous())
