"""How large the largest microbatch is; all take the leaves of each one's inputs."""

from collections.abc import Iterable, Sequence
from math import log2
from typing import Any

import torch


def size_class(microbatches: Iterable[Sequence[Any]]) -> int:
    """What ``shapes`` may be: a number for the largest microbatch's elements, the same within a
    quarter of an octave.

    Coarse, so that batches of any length need few
    plans.
    """
    return round(4 * log2(max(elements_of(microbatches), 1)))


def elements_of(microbatches: Iterable[Sequence[Any]]) -> int:
    """Of all tensors of the largest microbatch."""
    tensors = (
        [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves in microbatches
    )
    return max((sum(tensor.numel() for tensor in leaves) for leaves in tensors), default=0)


def tokens_of(microbatches: Iterable[Sequence[Any]]) -> int:
    """Of the largest tensor of whole numbers: token ids, where there are."""
    tensors = (leaf for leaves in microbatches for leaf in leaves if isinstance(leaf, torch.Tensor))
    return max(
        (tensor.numel() for tensor in tensors if tensor.dtype in (torch.int64, torch.int32)),
        default=0,
    )
