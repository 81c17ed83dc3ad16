"""Products in fp8 stay within what rounding each operand can do, forward and backward.

The oracle multiplies in float64, and the bound is derived from the two formats: of a row whose
largest number is a, each number x is off by at most |x| / 16 (e4m3 has three bits behind the
leading one), or by half of the smallest step, a / 448 / 1024, where it is tiny.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from roundpipe.kernels.scaled_linear import Rows, scaled_linear

TOKENS, COLUMNS, ROWS = 37, 64, 48
DTYPES = [torch.bfloat16, torch.float32]


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of very different sizes, as those of outliers are."""
    torch.manual_seed(0)
    input, weight = torch.randn(TOKENS, COLUMNS), torch.randn(ROWS, COLUMNS)
    input *= torch.logspace(-6, 2, TOKENS)[:, None] * torch.logspace(-1, 1, COLUMNS)
    weight *= torch.logspace(-3, 1, ROWS)[:, None]
    gradient = torch.randn(TOKENS, ROWS) * torch.logspace(-8, -4, TOKENS)[:, None]
    return input.to(dtype), weight.to(dtype), gradient.to(dtype)


def error_of(matrix: Tensor) -> Tensor:
    """How far each number of it may be off, with a scale for each of its rows."""
    matrix = matrix.double().abs()
    # The quotient with the scale is rounded once more, to float32.
    relative = matrix * (2**-4 + 2**-20)
    return torch.maximum(relative, matrix.amax(1, keepdim=True) / 448 / 1024 * (1 + 2**-10))


def bound_of(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """For each number of ``left @ right.T``: what the operands are off by, what float32 loses over
    the sum, and the result's own roundings."""
    size, off = (left.double().abs(), right.double().abs()), (error_of(left), error_of(right))
    operands = off[0] @ size[1].T + size[0] @ off[1].T + off[0] @ off[1].T
    most = (size[0] + off[0]) @ (size[1] + off[1]).T
    eps = torch.finfo(torch.bfloat16).eps + torch.finfo(dtype).eps
    return operands + most * (left.shape[1] + 4) * 2**-23 + most * eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_within_the_bound_of_their_roundings(dtype: torch.dtype) -> None:
    input, weight, gradient = operands(dtype)
    given = input.clone().requires_grad_(), weight.clone().requires_grad_()
    output = scaled_linear(*given)
    output.backward(gradient)
    assert (output.dtype, given[0].grad.dtype, given[1].grad.dtype) == (dtype,) * 3
    for made, left, right in (
        (output, input, weight),
        (given[0].grad, gradient, weight.t()),
        (given[1].grad, gradient.t(), input.t()),
    ):
        exact = left.double() @ right.double().T
        off = (made.double() - exact).abs()
        assert (off <= bound_of(left, right, dtype)).all()
        assert off.any()  # it is fp8 indeed


def test_numbers_of_fp8_are_multiplied_exactly() -> None:
    """Whole numbers up to 14, each row's largest being 14 = 448 / 32, are numbers of fp8."""
    torch.manual_seed(0)
    left, right = (torch.randint(-14, 15, (size, 32)).float() for size in (16, 32))
    left[:, 0], right[:, 0] = 14, 14
    made = scaled_linear(left, right)
    torch.testing.assert_close(made, linear(left, right).bfloat16().float(), rtol=0, atol=0)


def test_rows_of_zeros_and_what_is_not_a_number() -> None:
    """A row without a number is zeros, not 0 / 0; infinity and NaN are seen in the result, which a
    scaled loss in fp16 needs."""
    input = torch.randn(3, 16)
    input[0], input[1, 3] = 0, torch.inf
    assert Rows.of(input).scales.isfinite().tolist() == [[True], [False], [True]]
    made = scaled_linear(input, torch.randn(16, 16))
    assert (made[0] == 0).all()
    assert not made[1].isfinite().any()
    assert made[2].isfinite().all()


@pytest.mark.parametrize("trained", [(True, False), (False, True)], ids=["input", "weight"])
def test_only_what_the_backward_needs_is_kept(trained: tuple[bool, bool]) -> None:
    """A frozen weight, as under an adapter, keeps no input, and none is kept twice."""
    input, weight, gradient = operands(torch.bfloat16)
    given = [one.requires_grad_(is_on) for one, is_on in zip((input, weight), trained, strict=True)]
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = scaled_linear(*given)
    output.backward(gradient)
    needed = weight if trained[0] else input
    assert kept == [needed.untyped_storage().data_ptr()]
    assert [one.grad is not None for one in given] == list(trained)


@pytest.mark.parametrize("is_on", [True, False])
def test_dtype_is_that_of_a_plain_linear(is_on: bool) -> None:
    input, weight, _ = operands(torch.float32)
    bias = torch.randn(ROWS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
        plain = linear(input, weight, bias)
        output = scaled_linear(input[None], weight, bias)
    assert output.dtype is plain.dtype
    assert output.shape == (1, *plain.shape)
    output.sum().backward()
    assert bias.grad is not None
    assert (bias.grad == TOKENS).all()
