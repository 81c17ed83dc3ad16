"""The gradients that a loss makes beside those of the pipeline.

Parameters of its own have theirs in ``.grad``, where a round that has failed leaves what some of
its microbatches have added: they are put back before rounds run again. Those of the model's weights
that come from a penalty on them wait for the step, which adds them to the pipeline's.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.microbatch.sizes import tensor_leaves
from roundpipe.recompute.graph_leaves import leaves_beside

from ..engine.calls import LossFn


class LossGradients:
    """As they were before the rounds since the last step. Workers note, the user's thread restores
    between rounds."""

    def __init__(self) -> None:
        # Several workers evaluate a loss at once, and only the first of them sees the gradient as
        # it was.
        self._lock = threading.Lock()
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}
        self._penalties: dict[torch.Tensor, torch.Tensor] = {}

    def noted(self, loss_fn: LossFn) -> LossFn:
        """``loss_fn``, whose own parameters' gradients are looked at before it returns, and so
        before its backward."""

        def noting(outputs: Any, label: Any) -> Sequence[torch.Tensor]:
            model = _Outputs(outputs)
            losses = loss_fn(outputs, label)
            for loss in losses:
                self._note(model.leaves_beside(loss))
            return losses

        return noting

    def backward(self, loss: torch.Tensor, model: nn.Module) -> None:
        """Goes backward through whole calls of the engine, and through what ``loss`` computes with
        ``model``'s own weights."""
        own = set(model.parameters())
        leaves = set(_Outputs(()).leaves_beside(loss))
        self._note(leaves - own)
        penalised = leaves & own
        before = {weight: weight.grad for weight in penalised}
        try:
            for weight in penalised:
                weight.grad = None
            loss.backward()
            for weight in penalised:
                if weight.grad is not None:
                    known = self._penalties.get(weight)
                    self._penalties[weight] = weight.grad if known is None else known + weight.grad
        finally:
            for weight, gradient in before.items():
                weight.grad = gradient

    @property
    def penalties(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """Gradients of the model's weights that the pipeline does not know of."""
        return self._penalties

    def take_penalties(self) -> dict[torch.Tensor, torch.Tensor]:
        """The same, for the step that counts them."""
        taken, self._penalties = self._penalties, {}
        return taken

    def _note(self, leaves: Iterable[torch.Tensor]) -> None:
        with self._lock:
            for leaf in leaves:
                if leaf not in self._before:
                    self._before[leaf] = None if leaf.grad is None else leaf.grad.clone()

    @property
    def are_noted(self) -> bool:
        """Whether a loss computes with any parameter beside what the model returned."""
        return bool(self._before)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether a loss computes with it."""
        return parameter in self._before

    def restore(self) -> None:
        """No worker may be in a backward."""
        # Because what failed may still be queued there, on a worker's stream.
        self._wait_for_devices()
        for leaf, before in self._before.items():
            if before is None or leaf.grad is None:
                leaf.grad = before
            else:
                leaf.grad.copy_(before)  # in place, because somebody may hold it
        # Because the copies' memory is a worker's stream's again once they are gone.
        self._wait_for_devices()
        self._before.clear()
        self._penalties.clear()

    def forget(self) -> None:
        """They count."""
        self._before.clear()

    def _wait_for_devices(self) -> None:
        for device in {leaf.device for leaf in self._before} - {torch.device("cpu")}:
            torch.get_device_module(device).synchronize(device)


class _Outputs:
    """Where the model's part of a loss's graph begins. To be made before the loss can write to the
    outputs."""

    def __init__(self, outputs: Any) -> None:
        tensors = [leaf for leaf in tensor_leaves(outputs) if leaf.requires_grad]
        self._nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        self._tensors = set(tensors)

    def leaves_beside(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """What a backward of ``loss`` gives gradients without going through the model."""
        reached = leaves_beside([loss], self._nodes)
        yield from (leaf for leaf in reached if leaf not in self._tensors)
