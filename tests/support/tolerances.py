"""Two computations of one value have to agree as closely as arithmetic says, on any CPU.

A sum of n terms in floating point is off by at most ``CONFIDENCE * sqrt(n) * u * S``, nearly
always: u is the unit roundoff, eps / 2, S the sum of the terms' magnitudes, and rounding errors add
up like the steps of a random walk (Higham and Mary, 2019). Two orders of summation are each off by
that, so they differ by at most twice as much: ``CONFIDENCE * sqrt(n) * eps * S``.

Nobody keeps S. It is taken to be the largest magnitude among all values compared, because a single
gradient may have cancelled to nothing while its terms were as large as its neighbours'. Values that
are all 0 therefore have to be 0 in both. The errors of what is summed, which came through the
layers before, are not counted apart: the largest difference that our models show on a CPU is 4.9
eps times the largest gradient, where 48 tokens allow 13.9.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

CONFIDENCE = 2


def tolerance_of(values: Mapping[str, Tensor], terms: int) -> float:
    """An absolute tolerance for each element of ``values``, in which ``terms`` were summed."""
    largest = max(float(value.detach().abs().max()) for value in values.values())
    eps = max(torch.finfo(value.dtype).eps for value in values.values())
    return float(CONFIDENCE * terms**0.5 * eps * largest)


def assert_same_sums(
    actual: Mapping[str, Tensor] | Tensor, expected: Mapping[str, Tensor] | Tensor, terms: int
) -> None:
    """Each of ``actual`` is the one in ``expected``, up to the order in which was summed.

    Args:
        actual: a loss or logits; or gradients by parameter, all of one model and one backward.
        expected: the same, computed in another order.
        terms: the tokens, rows or images that are summed to one element.
    """
    if isinstance(actual, Tensor) or isinstance(expected, Tensor):
        assert isinstance(actual, Tensor)
        assert isinstance(expected, Tensor)
        actual, expected = {"value": actual}, {"value": expected}
    assert actual.keys() == expected.keys()
    atol = tolerance_of(expected, terms)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].detach(),
            value.detach(),
            rtol=0,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # type: ignore[misc]
