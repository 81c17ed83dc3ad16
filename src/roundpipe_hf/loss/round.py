"""One accumulation window as one pipeline round: its microbatches, and the loss function the
workers call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from roundpipe.microbatch import batch_size_of
from roundpipe.microbatch.sizes import tensor_leaves

from ..arguments import losses_on
from ..engine.calls import Microbatch
from .model_call import ComputeLoss, ModelAnswer, ModelCall, Replay, copied, refuse_loss

# They describe all rows of a packed batch together: a batch that has them is not cut.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")

AmountOf = Callable[[Mapping[str, Any]], float]
"""How much of what a mean is over a batch has."""

SplitRows = Callable[[Mapping[str, Any], int], list[dict[str, Any]]]
"""Cuts a batch into at most so many microbatches, and no more than it finds right."""


class StashedBatch(NamedTuple):
    """A batch of the accumulation window that waits for the window to close.

    ``divisor`` is what Trainer divides this batch's loss by: the window's number of batches, where
    the loss was not divided by the window's number of items already. ``syncs`` is what accelerate's
    `sync_gradients` was when the batch came: True for the window's last one.
    """

    inputs: Mapping[str, Any]
    num_items: torch.Tensor | int | None
    divisor: int
    syncs: bool = True


class MicrobatchLabel(NamedTuple):
    """What the loss function needs besides the outputs. Tensors in it are on the worker's device by
    then."""

    batch: int
    inputs: dict[str, Any]
    call: ModelCall
    num_items: torch.Tensor | int | None
    weight: float


def cut_window(
    batches: Sequence[StashedBatch],
    call_for: Callable[[StashedBatch], ModelCall],
    answer: ModelAnswer,
    split_rows: SplitRows,
    amount_of: AmountOf | None,
) -> list[Microbatch]:
    """All microbatches of the window, batch by batch, each row once.

    ``call_for``: how the model is called for a microbatch, some of which have images.
    ``amount_of``: what the loss is a mean over; None for a sum.
    """
    microbatches: list[Microbatch] = []
    for index, batch in enumerate(batches):
        for inputs, weight in _cut(batch.inputs, split_rows, amount_of):
            call = call_for(batch._replace(inputs=inputs))
            given = answer.arguments(call.arguments(inputs, batch.num_items))
            label = MicrobatchLabel(index, inputs, call, batch.num_items, weight)
            microbatches.append(((), given, label))
    return microbatches


def most_parts(inputs: Mapping[str, Any]) -> int:
    """Into how many microbatches a batch can be cut."""
    is_packed = any(inputs.get(name) is not None for name in _PACKED)
    return 1 if is_packed else rows_of(inputs)


def rows_of(inputs: Mapping[str, Any]) -> int:
    """How many rows a batch has; 1 if nothing in it has rows."""
    return batch_size_of((), dict(inputs)) or 1


def _cut(
    inputs: Mapping[str, Any], split_rows: SplitRows, amount_of: AmountOf | None
) -> list[tuple[dict[str, Any], float]]:
    parts = split_rows(inputs, most_parts(inputs))
    if amount_of is None or len(parts) == 1:
        return [(part, 1.0) for part in parts]
    counted = amount_of(inputs)
    if not counted:
        # A mean over nothing: whatever the loss makes of that, it makes of the whole batch.
        return [(part, 1.0) for part in split_rows(inputs, 1)]
    return [(part, amount_of(part) / counted) for part in parts]


def rows_at(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Those rows of everything that has rows."""
    size, index = rows_of(inputs), torch.tensor(rows)

    def take(leaf: Any) -> Any:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.size(0) == size
        return leaf.index_select(0, index.to(leaf.device)) if is_cut else leaf

    taken: dict[str, Any] = tree_map(take, dict(inputs))
    return taken


class RoundLoss:
    """The loss function of a round. Called by workers, once per microbatch; owns no tensors
    afterwards.

    Returns one loss per batch of the window, all but the microbatch's own zero, so that the
    engine's sums are the batches' losses.

    Args:
        writes: whether the loss may write to the batch, of which it gets a copy then.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        answer: ModelAnswer,
        batches: Sequence[StashedBatch],
        finish_outputs: Callable[[Any], Any],
        *,
        writes: bool,
    ) -> None:
        self._model = model
        self._compute_loss = compute_loss
        self._answer = answer
        self._divisors = [batch.divisor for batch in batches]
        # dict, BatchEncoding: as Trainer does
        self._container: Callable[[Any], Any] = type(batches[0].inputs)
        self._finish_outputs = finish_outputs
        self._writes = writes

    def __call__(self, outputs: Any, label: MicrobatchLabel) -> list[torch.Tensor]:
        loss = self._share(outputs, label) / self._divisors[label.batch]
        return [
            loss if index == label.batch else torch.zeros_like(loss)
            for index in range(len(self._divisors))
        ]

    def _share(self, outputs: Any, label: MicrobatchLabel) -> torch.Tensor:
        if label.weight == 0.0:  # a mean over nothing is nan, and so would be its gradient
            return _no_loss(outputs)
        loss = self._evaluate(outputs, label)
        return loss if label.weight == 1.0 else loss * label.weight

    def _evaluate(self, outputs: Any, label: MicrobatchLabel) -> torch.Tensor:
        given = copied(label.inputs) if self._writes else label.inputs
        inputs = self._container(given)
        expected = self._answer.arguments(label.call.arguments(given, label.num_items))
        replay = Replay(
            self._model, self._answer, self._finish_outputs(outputs), expected, label.batch
        )
        with losses_on(replay.device):
            loss: torch.Tensor = self._compute_loss(
                replay, inputs, num_items_in_batch=label.num_items
            )
        is_trained = any(leaf.requires_grad for leaf in tensor_leaves(outputs))
        refuse_loss(loss, was_called=replay.was_called, is_of_rows=True, is_trained=is_trained)
        return loss


def _no_loss(outputs: Any) -> torch.Tensor:
    """Zero, with a graph, so that backward has somewhere to start. From the logits, for the model's
    loss is nan."""
    leaves = [leaf for leaf in tensor_leaves(outputs) if leaf.is_floating_point()]
    return max(leaves, key=torch.Tensor.numel).float().sum() * 0.0
