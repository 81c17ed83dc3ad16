"""Joins a pipelined forward to the caller's autograd graph: its backward is one more round through the pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .transfer import Boundary

Gradients = Sequence[torch.Tensor | None]
RunBackward = Callable[[list[Gradients]], Gradients]


class _Round(torch.autograd.Function):
    """Inputs: the caller's tensors that want a gradient, and an anchor. Outputs: every output leaf that carries one."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Gradients], Gradients], made: list[torch.Tensor], *_: torch.Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipelined forward cannot be differentiated twice (create_graph=True); its gradients have no graph"
            )
        run, ctx.run = ctx.run, None
        if run is None:
            raise RuntimeError("backward was called twice through one pipelined forward; call the model again")
        return None, None, None, *run(gradients)


def attach(outputs: list[Boundary], inputs: Sequence[torch.Tensor], run_backward: RunBackward) -> list[Any]:
    """The outputs of each microbatch as parts of the caller's graph.

    Args:
        outputs: per microbatch, its tensors detached and on the output device.
        inputs: the caller's tensors that want a gradient, in the order ``run_backward`` returns their gradients.
        run_backward: takes, per microbatch, gradients for the carrying leaves; returns gradients for ``inputs``.
    """
    made = [leaf for boundary in outputs for leaf in _carrying(boundary)]
    if not made:
        return [boundary.value for boundary in outputs]
    counts = [len(_carrying(boundary)) for boundary in outputs]

    def run(gradients: Gradients) -> Gradients:
        remaining = iter(gradients)
        return run_backward([[next(remaining) for _ in range(count)] for count in counts])

    anchor = torch.zeros(
        (), requires_grad=True
    )  # because without inputs that want a gradient nothing would be recorded
    with torch.enable_grad():
        joined = iter(_Round.apply(run, made, anchor, *inputs))
    attached = []
    for boundary in outputs:
        leaves = [next(joined) if c else leaf for leaf, c in zip(boundary.leaves, boundary.carries, strict=True)]
        attached.append(pytree.tree_unflatten(leaves, boundary.spec))
    return attached


def _carrying(boundary: Boundary) -> list[torch.Tensor]:
    return [leaf for leaf, carries in zip(boundary.leaves, boundary.carries, strict=True) if carries]
