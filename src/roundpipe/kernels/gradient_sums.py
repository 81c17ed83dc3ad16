"""Sums of gradients and their rounding on a GPU, in as few passes over memory as there can be.

torch's own operations on tensors of two dtypes reach half of the memory's bandwidth, and take a
pass for each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _ROW_BLOCK = 4096, 2048
_LEAST_ELEMENTS = 1 << 18  # with fewer, starting a kernel takes longer than torch's operations
_NARROW = (torch.bfloat16, torch.float16)
# `_add` by all that Triton compiles it for. Looked up here because Triton takes 5 us more, for each
# parameter of each microbatch, in which no other worker's Python runs.
_compiled: dict[tuple[object, ...], Any] = {}


@triton.jit
def _add(total, one, other, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_there = at < count
    value = tl.load(one + at, mask=is_there).to(tl.float32) + tl.load(other + at, mask=is_there).to(
        tl.float32
    )
    tl.store(total + at, value, mask=is_there)


@triton.jit
def _round(total, rounded, norms, length, block: tl.constexpr):
    """One row, and the 2-norm of what it is rounded to."""
    row = tl.program_id(0).to(tl.int64)
    total += row * length
    rounded += row * length
    squares = tl.zeros([block], tl.float32)
    for start in range(0, length, block):
        at = start + tl.arange(0, block)
        is_there = at < length
        value = tl.load(total + at, mask=is_there, other=0.0).to(rounded.dtype.element_ty)
        tl.store(rounded + at, value, mask=is_there)
        wide = value.to(tl.float32)
        squares += wide * wide
    tl.store(norms + row, tl.sqrt(tl.sum(squares)))


def can_add(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether `add` is for these: the sum so far, or the first gradient, and another one, to be
    summed in ``dtype``."""
    return dtype is torch.float32 and other.dtype in _NARROW and _is_large(one) and _is_large(other)


def can_round(total: Tensor, dtype: torch.dtype) -> bool:
    """Whether `rounded` is."""
    return total.dtype is torch.float32 and dtype in _NARROW and _is_large(total)


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() >= _LEAST_ELEMENTS and tensor.dim() > 1 and tensor.is_contiguous()


def add(one: Tensor, other: Tensor) -> Tensor:
    """The sum in fp32, in the memory of ``one`` if that is fp32."""
    total = one if one.dtype is torch.float32 else torch.empty_like(one, dtype=torch.float32)
    count, device = total.numel(), total.device.index
    grid = (-(-count // _BLOCK), 1, 1)
    alignments = total.data_ptr() % 16, one.data_ptr() % 16, other.data_ptr() % 16
    key = device, one.dtype, other.dtype, count, alignments
    with torch.accelerator.device_index(device):  # because kernels start on the current one
        if key in _compiled:
            _compiled[key][grid](total, one, other, count, _BLOCK)
        else:
            _compiled[key] = _add[grid](total, one, other, count, block=_BLOCK, num_warps=8)
    return total


def rounded(total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``total`` in ``dtype``, and the 2-norms of its rows then."""
    result = torch.empty_like(total, dtype=dtype)
    norms = torch.empty(len(total), dtype=torch.float32, device=total.device)
    with torch.accelerator.device_index(total.device.index):
        _round[(len(total),)](total, result, norms, total[0].numel(), block=_ROW_BLOCK, num_warps=4)
    return result, norms
