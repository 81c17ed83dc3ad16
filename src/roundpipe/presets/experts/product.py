"""Products of groups of rows, each with a matrix of its own and what an adapter adds to that, as
one operation.

The compiler keeps an operation whole, so a block with experts compiles in one piece. What it makes
of the products inside fails as it runs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def grouped_product(
    input: Tensor,
    weight: Tensor,
    ends: Tensor,
    factors: tuple[Tensor, Tensor] | None = None,
    scaling: float = 1.0,
) -> Tensor:
    """Returns ``input @ (weight + scaling * left @ right)`` (rows, columns), each row with the
    matrices of its group.

    Args:
        input: (rows, width), those of the first group first.
        weight: (groups, width, columns).
        ends: (groups,), int32: the number of rows up to each group's last.
        factors: ``left`` (groups, width, rank) and ``right`` (groups, rank, columns); None: there
            is nothing to add.
    """
    left, right = factors or (None, None)
    made: tuple[Tensor, Tensor] = _product(input, weight, left, right, ends, scaling)
    return made[0]


@torch.library.custom_op("roundpipe::grouped_product", mutates_args=())
def _product(
    input: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    ends: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The second output, ``scaling * input @ left`` (rows, rank), is kept for the backward."""
    made = _grouped(input, weight, offs=ends)
    if left is None or right is None:
        return made, input.new_empty(0)
    inner = _scaled(_grouped(input, left, offs=ends), scaling)
    return made.add_(_grouped(inner, right, offs=ends)), inner


@_product.register_fake
def _(
    input: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    ends: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    made = input.new_empty(input.shape[0], weight.shape[-1])
    rank = () if left is None else (input.shape[0], left.shape[-1])
    return made, input.new_empty(rank or (0,))


@torch.library.custom_op("roundpipe::grouped_product_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    ends: Tensor,
    inner: Tensor,
    scaling: float,
    trains_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by input, weight, left and right; empty where none is wanted."""
    gradient = gradient.contiguous()
    none = [gradient.new_empty(0) for _ in range(3)]  # one each, because outputs share no memory
    by_input = _grouped(gradient, weight.mT, offs=ends)
    by_weight = _grouped(input.mT, gradient, offs=ends) if trains_weight else none[0]
    if left is None or right is None:
        return by_input, by_weight, none[1], none[2]
    by_inner = _scaled(_grouped(gradient, right.mT, offs=ends), scaling)
    by_input.add_(_grouped(by_inner, left.mT, offs=ends))
    by_left = _grouped(input.mT, by_inner, offs=ends)
    return by_input, by_weight, by_left, _grouped(inner.mT, gradient, offs=ends)


@_backward.register_fake
def _(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    ends: Tensor,
    inner: Tensor,
    scaling: float,
    trains_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = [t.shape if t is not None else (0,) for t in (left, right)]
    return (
        input.new_empty(input.shape),
        weight.new_empty(weight.shape if trains_weight else (0,)),
        weight.new_empty(shapes[0]),
        weight.new_empty(shapes[1]),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    trains_weight = ctx.needs_input_grad[1]
    made = _backward(gradient, *ctx.saved_tensors, ctx.scaling, trains_weight)
    wanted = zip(made, ctx.needs_input_grad, strict=False)
    return *(by if is_wanted else None for by, is_wanted in wanted), None, None


_product.register_autograd(_gradients, setup_context=_keep)


def _grouped(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """Leaves no gaps between rows, as the compiler is told, where torch does at the ends of odd
    ones."""
    return functional.grouped_mm(left, right, offs=offs).contiguous()


def _scaled(made: Tensor, scaling: float) -> Tensor:
    return made if scaling == 1 else made.mul_(scaling)
