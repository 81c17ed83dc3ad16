"""A linear layer's three products in fp8, each operand with a scale for every row that is not
summed over. See docs/internals/fp8.md."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_TINY = torch.finfo(torch.float32).tiny
ALIGNMENT = 16  # what kernels want every size of a weight to be a multiple of


class Rows(NamedTuple):
    """A matrix whose rows are ``values * scales``: (rows, columns) in fp8, and (rows, 1)."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> "Rows":
        """``matrix`` rounded: the largest number of a row becomes the largest of fp8."""
        largest = matrix.abs().amax(1, keepdim=True).float()
        scales = (largest / _LARGEST).clamp(min=_TINY)  # because a row may be all zeros
        return cls((matrix / scales).to(_FP8).contiguous(), scales)


def scaled_product(left: Rows, right: Rows, *, is_fast: bool) -> Tensor:
    """``left @ right.T`` as bfloat16, summed in float32.

    Args:
        is_fast: a GPU may sum with fewer bits.
    """
    if left.values.is_cuda:
        return torch._scaled_mm(
            left.values,
            right.values.t(),
            scale_a=left.scales,
            scale_b=right.scales.reshape(1, -1),
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )
    with torch.autocast("cpu", enabled=False):
        summed = left.values.float() @ right.values.float().t()
    return (summed * left.scales * right.scales.t()).to(torch.bfloat16)


def _aligned(matrix: Tensor) -> Tensor:
    """With rows of zeros added, because kernels want this many to sum over."""
    missing = -matrix.shape[0] % ALIGNMENT
    return pad(matrix, (0, 0, 0, missing)) if missing else matrix


class _ScaledLinear(torch.autograd.Function):
    """Keeps its operands as they were given, which others keep too, and rounds them again along the
    other dimension."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        needs_input, needs_weight = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        ctx.dtypes = input.dtype, weight.dtype
        return scaled_product(Rows.of(input), Rows.of(weight), is_fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        of_input = of_weight = None
        if weight is not None:
            by_column = Rows.of(weight.t())
            of_input = scaled_product(Rows.of(gradient), by_column, is_fast=False).to(input_dtype)
        if input is not None:
            left, right = (Rows.of(_aligned(matrix).t()) for matrix in (gradient, input))
            of_weight = scaled_product(left, right, is_fast=False).to(weight_dtype)
        return of_input, of_weight


def scaled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`, with its product and those of the backward in fp8.

    Args:
        input: (..., columns).
        weight: (rows, columns), both multiples of 16.
        bias: (rows,), added outside of the product.

    Returns:
        (..., rows), in the dtype that autocast asks for, else in the input's.
    """
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    made = _ScaledLinear.apply(input.reshape(-1, input.shape[-1]), weight)
    output: Tensor = made.to(dtype).reshape(*input.shape[:-1], -1)
    return output if bias is None else output + bias.to(dtype)
