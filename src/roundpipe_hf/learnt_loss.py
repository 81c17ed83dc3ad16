"""What is known of a trainer's loss: how it calls the model, and how microbatches' losses make that of their batch."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from roundpipe import RoundPipe
from roundpipe.microbatch import batch_size_of

from .compat import base_model, loss_adds_up, makes_causal_loss, valid_targets
from .engine import runs_by_preset
from .loss_rule import ADDS_UP, KEEP_WHOLE, Evaluated, LossRule, MeanOver, learn_rule
from .replay import LossAnswer, ModelAnswer, ModelCall, record_call
from .round import Microbatch, RoundLoss, StashedBatch, cut_window, parts_of, rows_of

if TYPE_CHECKING:
    from .mixin import RoundPipeTrainerMixin

logger = logging.getLogger(__name__)


class LearntLoss:
    """Used by the user's thread only."""

    def __init__(self, trainer: "RoundPipeTrainerMixin") -> None:
        self._trainer = trainer
        self._calls: dict[tuple[Any, ...], ModelCall] = {}
        self._rule: LossRule | None = None

    def forget(self) -> None:
        """A new run starts, perhaps with another loss."""
        self._calls.clear()
        self._rule = None

    def cut(
        self, engine: RoundPipe, batches: Sequence[StashedBatch], num_microbatch: int
    ) -> tuple[list[Microbatch], RoundLoss]:
        """The microbatches of a round, and its loss function."""
        trainer = self._trainer
        call = self._call_for(batches[0])
        precision = trainer.precision()

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            with precision.in_loss():
                return trainer.compute_loss(*args, **kwargs)

        rule = self._rule_for(engine, batches, call, num_microbatch)
        answer = LossAnswer() if self._reads_only_losses(engine, batches) else trainer.answer
        loss_fn = RoundLoss(engine.model, compute_loss, call, answer, rule, batches, precision.finish)
        return cut_window(batches, call, answer, rule, num_microbatch, self._measure), loss_fn

    def most_microbatches(self, engine: RoundPipe, batches: Sequence[StashedBatch]) -> int:
        """Into how many the largest batch can be cut."""
        most = max(len(parts_of(batch.inputs, rows_of(batch.inputs))) for batch in batches)
        return most if self._rule_for(engine, batches, self._call_for(batches[0]), most).can_cut else 1

    def _call_for(self, batch: StashedBatch) -> ModelCall:
        """See [Note: the model call]. Recorded once, because what `compute_loss` does before the call runs again."""
        trainer = self._trainer
        key = (*sorted(batch.inputs), batch.num_items is not None, trainer.model.training)
        if key not in self._calls:
            self._calls[key] = record_call(trainer.compute_loss, trainer.model, batch.inputs, batch.num_items)
        return self._calls[key]

    def _rule_for(
        self, engine: RoundPipe, batches: Sequence[StashedBatch], call: ModelCall, num_microbatch: int
    ) -> LossRule:
        if self._is_known_to_add_up(batches):
            return ADDS_UP
        cut = next((batch for batch in batches if len(parts_of(batch.inputs, num_microbatch)) > 1), None)
        if cut is None:
            return KEEP_WHOLE
        if self._rule is None:
            self._rule = self._learn(engine, cut, call)
        return self._rule or KEEP_WHOLE

    def _reads_only_losses(self, engine: RoundPipe, batches: Sequence[StashedBatch]) -> bool:
        """Whether nobody looks at logits, and the model is one whose preset need not make them.

        Not where a loss is divided by nothing: the gradients of masked rows are zero even then if there are logits.
        """
        trainer = self._trainer
        is_stock = trainer.has_stock_loss() and trainer.compute_loss_func is None and trainer.label_smoother is None
        return (
            is_stock
            and type(trainer.answer) is ModelAnswer
            and makes_causal_loss(base_model(trainer.model))
            and all(batch.num_items is not None and bool(batch.num_items > 0) for batch in batches)
            and runs_by_preset(engine)
        )

    def _is_known_to_add_up(self, batches: Sequence[StashedBatch]) -> bool:
        trainer = self._trainer
        is_stock = trainer.has_stock_loss() and trainer.compute_loss_func is None
        return is_stock and loss_adds_up(trainer) and all(batch.num_items is not None for batch in batches)

    def _learn(self, engine: RoundPipe, batch: StashedBatch, call: ModelCall) -> LossRule | None:
        """Asks the loss (see loss_rule.py) with a few forwards of two rows; draws no random numbers."""
        was_training = engine.training
        engine.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                rule = learn_rule(batch.inputs, lambda inputs: self._evaluate(inputs, batch.num_items), self._measure)
        finally:
            engine.train(was_training)
        if rule is not None and rule.has_sum and rule.mean_over is not None and call.num_items is not None:
            rule = KEEP_WHOLE  # because the model mixes both parts into one loss, which cannot be taken apart later
        if rule is KEEP_WHOLE:
            logger.warning(
                "the loss of a batch is no sum or mean over its rows, so batches are not cut into microbatches; "
                "use gradient accumulation to keep several devices busy"
            )
        return rule

    def _evaluate(self, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None) -> Evaluated:
        once = self._loss_of(inputs, num_items)
        return Evaluated(once, None if num_items is None else self._loss_of(inputs, num_items * 2))

    def _loss_of(self, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None) -> float:
        trainer = self._trainer
        model = trainer.stand_in(num_microbatch=1)
        return float(trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items))

    def _measure(self, inputs: Mapping[str, Any], over: MeanOver) -> float | None:
        if over is MeanOver.TARGETS:
            valid = valid_targets(self._trainer, inputs)
            return None if valid is None else float(valid.sum())
        labels = inputs.get("labels")
        if over is MeanOver.LABELS:
            if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
                return None
            return float(labels.ne(-100).sum())
        return float(batch_size_of((), dict(inputs)) or 0)
