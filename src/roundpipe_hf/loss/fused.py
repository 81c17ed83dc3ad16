"""Losses whose reduction is known: computed by workers for each microbatch, where its outputs are.

See [Note: two paths] in reduction.py for which those are.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError

from ..arguments import HOST, LossReduction, losses_on
from ..compat import base_model, makes_causal_loss, valid_targets
from ..engine.calls import Microbatch
from ..engine.slot import runs_by_preset
from .model_call import (
    EngineStandIn,
    LossAnswer,
    ModelAnswer,
    ModelCall,
    copied,
    record_call,
    refuse_loss,
)
from .reduction import amount_of, declared_reduction, is_known, is_users, reduction_of
from .round import RoundLoss, StashedBatch, cut_window, most_parts, rows_at

# Relative. Losses of one row and of two come from other kernels, below fp32 with other roundings.
_TOLERANCE, _TOLERANCE_BELOW_FP32 = 1e-4, 2e-2


class FusedLoss:
    """Used by the user's thread only."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._calls: dict[tuple[Any, ...], ModelCall] = {}
        self._about: tuple[Any, ...] = ()
        self._fits: bool | None = None  # None until a batch could tell

    def forget(self) -> None:
        """A new run starts, perhaps with another loss."""
        self._calls.clear()
        self._fits = None

    def reduction(self, engine: RoundPipe, batches: Sequence[StashedBatch]) -> LossReduction | None:
        """None for a loss that runs on whole batches.

        Raises:
            ConfigError: the loss does not reduce its rows as it was declared to.
        """
        self._forget_another_loss()
        trainer = self._trainer
        reduction = reduction_of(trainer, batches, engine)
        if reduction is None or is_known(trainer, batches, engine):
            return reduction
        if self._fits is None:
            self._check(engine, batches, reduction)
        return None if self._fits is False else reduction

    def cut(
        self,
        engine: RoundPipe,
        batches: Sequence[StashedBatch],
        reduction: LossReduction,
        num_microbatch: int,
    ) -> tuple[list[Microbatch], RoundLoss]:
        """The microbatches of a round, and its loss function."""
        trainer = self._trainer
        precision = trainer.precision()

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            with precision.in_loss():
                return trainer.compute_loss(*args, **kwargs)

        answer = LossAnswer() if self._reads_only_losses(engine, batches) else trainer.answer
        loss_fn = RoundLoss(
            engine.model,
            compute_loss,
            answer,
            batches,
            precision.finish,
            writes=is_users(trainer),
        )
        amount = None if reduction == "sum" else partial(amount_of, trainer, reduction=reduction)

        def split_rows(inputs: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
            return engine.split_rows(inputs, min(num_microbatch, most))

        return cut_window(batches, self._call_for, answer, split_rows, amount), loss_fn

    def _forget_another_loss(self) -> None:
        """A callback, or the user between two evaluations, may have put another loss or model in
        the trainer."""
        trainer = self._trainer
        # A reference, because the model before is not to outlive its replacement.
        model = weakref.ref(trainer.model)
        about = (trainer.compute_loss, trainer.compute_loss_func, trainer.label_smoother, model)
        if about != self._about:
            self.forget()
            self._about = about

    def _call_for(self, batch: StashedBatch) -> ModelCall:
        """See [Note: the model call]. Recorded once, because what `compute_loss` does before the
        call runs again."""
        trainer = self._trainer
        key = (*sorted(batch.inputs), batch.num_items is not None, trainer.model.training)
        if key not in self._calls:
            self._calls[key] = record_call(
                trainer.compute_loss, trainer.model, batch.inputs, batch.num_items
            )
        return self._calls[key]

    def _reads_only_losses(self, engine: RoundPipe, batches: Sequence[StashedBatch]) -> bool:
        """Whether nobody looks at logits, and the model is one whose preset need not make them.

        Not where the loss of a microbatch is divided by nothing: the gradients of masked rows are
        zero even then if there are logits.
        """
        trainer = self._trainer
        return (
            not is_users(trainer)
            and trainer.label_smoother is None
            and type(trainer.answer) is ModelAnswer
            and (engine.averages_labels or makes_causal_loss(base_model(trainer.model)))
            and all(_counts_something(trainer, batch, engine) for batch in batches)
            and runs_by_preset(engine)
        )

    # --- a declaration that does not fit ---

    def _check(
        self, engine: RoundPipe, batches: Sequence[StashedBatch], reduction: LossReduction
    ) -> None:
        """Compares the loss of two rows with those of each, once, without gradients and without
        dropout."""
        batch = next((batch for batch in batches if most_parts(batch.inputs) > 1), None)
        if batch is None:
            return
        trainer = self._trainer
        both, parts = _two_rows(engine, batch.inputs)
        weights = [1.0] * len(parts)
        if reduction != "sum":
            amounts = [amount_of(trainer, part, reduction) for part in parts]
            if not all(amounts):
                return  # a mean over nothing tells nothing
            weights = [amount / sum(amounts) for amount in amounts]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            whole, *each = (
                self._loss_of(engine, inputs, batch.num_items) for inputs in (both, *parts)
            )
        expected = sum(weight * loss for weight, loss in zip(weights, each, strict=True))
        scale = max(abs(whole), abs(expected))
        self._fits = not abs(whole - expected) > self._tolerance() * scale  # nan tells nothing
        if not self._fits and declared_reduction(trainer) is not None:
            raise ConfigError(
                f"loss_reduction={reduction!r} does not fit the loss: two rows together have the "
                f"loss {whole:.6g}, and one by one {each[0]:.6g} and {each[1]:.6g}, which would "
                f"make {expected:.6g}. Declare another one, or none: the loss is then computed on "
                "whole batches"
            )

    def _loss_of(
        self, engine: RoundPipe, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None
    ) -> float:
        trainer = self._trainer
        mode = trainer.model.training
        was_called = False

        def run(**given: Any) -> Any:
            nonlocal was_called
            was_called = True
            engine.eval()
            try:
                return trainer.stand_in(num_microbatch=1)(**given)
            finally:
                engine.train(mode)

        model = EngineStandIn(trainer.model, run)
        with losses_on(HOST):
            given = copied(inputs)
            loss = trainer.compute_loss(model, given, num_items_in_batch=num_items)
        refuse_loss(loss, was_called=was_called, is_of_rows=True, is_trained=False)
        return float(loss)

    def _tolerance(self) -> float:
        trainer = self._trainer
        is_exact = trainer.precision().autocast is None and all(
            parameter.dtype.itemsize >= 4
            for parameter in trainer.model.parameters()
            if parameter.is_floating_point()
        )
        return _TOLERANCE if is_exact else _TOLERANCE_BELOW_FP32


def _counts_something(trainer: Any, batch: StashedBatch, engine: RoundPipe) -> bool:
    """Whether no microbatch's loss is divided by nothing: its items, where Trainer has counted them
    (which it does not for models that would not be told) and the model heeds them, else its
    targets."""
    if batch.num_items is not None and not engine.averages_labels:
        return bool(batch.num_items > 0)
    valid = valid_targets(trainer, batch.inputs)
    return valid is not None and bool(valid.flatten(1).any(dim=1).all())


def _two_rows(
    engine: RoundPipe, inputs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Together and one by one. Of rows with images, which the engine knows by their order, the
    first two."""
    if "input_ids" in inputs and inputs.keys() & {"pixel_values", "pixel_values_videos"}:
        both = engine.split_rows(inputs, most_parts(inputs) // 2)[0]
        if most_parts(both) == 3:
            both = engine.split_rows(both, 2)[0]
        return both, engine.split_rows(both, 2)
    rows = _unlike(inputs)
    return rows_at(inputs, rows), [rows_at(inputs, [row]) for row in rows]


def _unlike(inputs: Mapping[str, Any]) -> list[int]:
    """Two rows of a batch: those with the most and the fewest labels that count."""
    count = most_parts(inputs)
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
        return [0, count - 1]
    valid = labels.ne(-100).sum(dim=1)
    most, fewest = int(valid.argmax()), int(valid.argmin())
    return sorted({most, fewest}) if most != fewest else [0, count - 1]
