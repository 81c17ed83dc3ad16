"""How large the largest microbatch is; all take the leaves of each one's inputs."""

from collections.abc import Iterable, Sequence
from math import log2
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def size_class(microbatches: Iterable[Sequence[Any]]) -> int:
    """What ``shapes`` may be: a number for the largest microbatch's elements, the same within a
    quarter of an octave.

    Coarse, so that batches of any length need few
    plans.
    """
    return round(4 * log2(max(elements_of(microbatches), 1)))


def elements_of(microbatches: Iterable[Sequence[Any]]) -> int:
    """Of all tensors of the largest microbatch."""
    tensors = map(tensor_leaves, microbatches)
    return max((sum(tensor.numel() for tensor in leaves) for leaves in tensors), default=0)


def tokens_of(microbatches: Iterable[Sequence[Any]]) -> int:
    """Of the largest tensor of whole numbers: token ids, where there are."""
    tensors = tensor_leaves(list(microbatches))
    whole = (tensor for tensor in tensors if tensor.dtype in (torch.int64, torch.int32))
    return max(map(torch.Tensor.numel, whole), default=0)


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in a tree, in its order."""
    leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def first_of_graph(value: Any) -> torch.Tensor | None:
    """The first tensor in a tree that an operation with a backward has made."""
    return next((leaf for leaf in tensor_leaves(value) if leaf.grad_fn is not None), None)
