"""How far two computations of one gradient may lie apart: by arithmetic, so that it holds on any
CPU.

Two ways to sum n products in floating point differ by rounding errors that add up like a random
walk, so by about eps * sqrt(n) * (size of a term). What is summed are the products of what flows
back, which is as large as the largest gradient of the model, whatever a single sum cancels to.
"""

from collections.abc import Mapping

import torch

# Layers that a rounding error passes through before it reaches a weight: embeddings, the blocks of
# the tests' models with their several sums each, and the head.
SUMS_IN_A_ROW = 4


def gradient_atol(gradients: Mapping[str, torch.Tensor], terms: int) -> float:
    """An absolute tolerance for each element of ``gradients``, all of one model.

    Args:
        gradients: by parameter, of one backward.
        terms: that are summed to one element: the tokens of the batch.
    """
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    eps = max(torch.finfo(gradient.dtype).eps for gradient in gradients.values())
    return float(eps * (terms * SUMS_IN_A_ROW) ** 0.5 * max(largest, eps))


def assert_same_gradients(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], terms: int
) -> None:
    """Each of ``actual`` is the one in ``expected``, up to the order of ``terms`` summed tokens."""
    atol = gradient_atol(expected, terms)
    for name, gradient in actual.items():
        torch.testing.assert_close(
            gradient,
            expected[name],
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # type: ignore[misc]
