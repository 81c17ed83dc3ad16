"""The leaves of an autograd graph: what a backward through it gives gradients."""

from collections.abc import Iterable, Iterator

import torch
from torch.autograd.graph import Node


def leaves_beside(
    losses: Iterable[torch.Tensor], nodes: Iterable[Node | None]
) -> Iterator[torch.Tensor]:
    """The leaves whose gradients a backward of the losses writes, without those that it reaches
    through ``nodes`` alone."""
    waiting, seen = [], set(nodes)
    for loss in losses:
        if loss.is_leaf and loss.requires_grad:
            yield loss
        waiting.append(loss.grad_fn)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a node that adds to the gradient of a leaf
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]
