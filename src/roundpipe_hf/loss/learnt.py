"""What is known of a trainer's loss: how it calls the model, and how microbatches' losses make that
of their batch.

[Note: asked again] A loss of the user's may take another form later: a term that is warmed up from
zero, or that is there in training only. So such a loss is asked in training and in evaluation, and
again after 1, 2, 4, 8, ... steps; forms that were seen once are reckoned with from then on. At
every step would cost more than the step. It is also asked again, a few times, when a batch shows
traits that it was not asked about ([Note: traits]).
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundpipe import RoundPipe
from roundpipe.microbatch import batch_size_of

from ..arguments import HOST, losses_on, pipeline_of
from ..compat import base_model, loss_adds_up, makes_causal_loss, valid_targets
from ..engine.calls import Microbatch
from ..engine.slot import runs_by_preset
from .model_call import EngineStandIn, LossAnswer, ModelAnswer, ModelCall, copied, record_call
from .round import RoundLoss, StashedBatch, cut_window, most_parts, parts_of
from .rule import (
    ADDS_UP,
    KEEP_WHOLE,
    TOLERANCE,
    TOLERANCE_BELOW_FP32,
    Evaluated,
    LossRule,
    MeanOver,
    either,
    learn_rule,
)
from .sample import Trait, sample_of, telling_rows, traits_of

logger = logging.getLogger(__name__)

# Times that a loss is asked because of new traits. A data set's own numbering shows one with every
# batch.
_MOST_NEW = 8


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a loss has answered, None while no batch could tell, and the first and the last step it
    was due at.

    ``shown`` are the traits of those batches' samples, of which ``num_new`` were because of others
    than before.
    """

    first: int
    last: int
    rule: LossRule | None = None
    shown: frozenset[Trait] = frozenset()
    num_new: int = 0

    def is_due(self, step: int) -> bool:
        """See [Note: asked again]."""
        return step > self.last and step - self.first >= 2 * (self.last - self.first)

    def news_in(self, batches: Sequence[StashedBatch]) -> StashedBatch | None:
        """The first batch that has rows with a trait that was not shown yet."""
        if self.num_new == _MOST_NEW:
            return None
        several = (batch for batch in batches if most_parts(batch.inputs) > 1)
        return next(
            (batch for batch in several if set().union(*traits_of(batch.inputs)) - self.shown), None
        )

    def after(self, batch: StashedBatch) -> "Asked":
        """The sample of ``batch`` was shown."""
        traits = traits_of(batch.inputs)
        shown = self.shown.union(*(traits[row] for row in telling_rows(batch.inputs, self.shown)))
        has_news = bool(self.shown) and shown != self.shown
        return replace(self, shown=shown, num_new=self.num_new + has_news)


class _CannotAnswer(Exception):
    """The loss itself raised, not the model: it may need more rows than it was asked about."""


class LearntLoss:
    """Used by the user's thread only."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._calls: dict[tuple[Any, ...], ModelCall] = {}
        self._asked: dict[bool, Asked] = {}  # by whether the model trains
        self._about: tuple[Any, ...] = ()

    def forget(self) -> None:
        """A new run starts, perhaps with another loss."""
        self._calls.clear()
        self._asked.clear()

    def cut(
        self, engine: RoundPipe, batches: Sequence[StashedBatch], num_microbatch: int
    ) -> tuple[list[Microbatch], RoundLoss]:
        """The microbatches of a round, and its loss function."""
        trainer = self._trainer
        self._forget_another_loss()
        call = self._call_for(batches[0])
        precision = trainer.precision()

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            with precision.in_loss():
                return trainer.compute_loss(*args, **kwargs)

        rule = self._rule_for(engine, batches, call, num_microbatch)
        answer = LossAnswer() if self._reads_only_losses(engine, batches) else trainer.answer
        loss_fn = RoundLoss(
            engine.model,
            compute_loss,
            call,
            answer,
            rule,
            batches,
            precision.finish,
            writes=self._is_users(),
        )
        return cut_window(batches, call, answer, rule, num_microbatch, self._measure), loss_fn

    def most_microbatches(self, engine: RoundPipe, batches: Sequence[StashedBatch]) -> int:
        """Into how many the largest batch can be cut."""
        self._forget_another_loss()
        most = max(most_parts(batch.inputs) for batch in batches)
        return (
            most if self._rule_for(engine, batches, self._call_for(batches[0]), most).can_cut else 1
        )

    def _forget_another_loss(self) -> None:
        """A callback, or the user between two evaluations, may have put another loss or model in
        the trainer."""
        trainer = self._trainer
        model = weakref.ref(
            trainer.model
        )  # because the one before is not to outlive its replacement
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

    def _rule_for(
        self,
        engine: RoundPipe,
        batches: Sequence[StashedBatch],
        call: ModelCall,
        num_microbatch: int,
    ) -> LossRule:
        if self._is_known_to_add_up(batches):
            return ADDS_UP
        trainer = self._trainer
        is_users = self._is_users()
        mode, step = is_users and trainer.model.training, trainer.state.global_step
        asked = self._asked.get(mode, Asked(first=step, last=step))
        before, is_due = asked.rule, is_users and asked.is_due(step)
        news = asked.news_in(batches) if is_users else None
        has_news = news is not None
        if (is_due or has_news) and mode and pipeline_of(trainer.args).async_optimizer:
            # Because asking does, and an update is to be seen at the same step in every plan.
            engine.synchronize()
        can_cut = any(len(parts_of(batch.inputs, num_microbatch)) > 1 for batch in batches)
        asks = news or next((batch for batch in batches if most_parts(batch.inputs) > 1), None)
        while asks is not None and (is_due or has_news or asked.rule is None):
            # A batch that is kept whole is right whatever the loss becomes.
            if can_cut and (asked.rule is None or asked.rule.can_cut):
                asked = replace(asked, rule=self._learn(engine, asks, call, asked))
            if is_users:
                asked = asked.after(asks)
            asks = asked.news_in(batches) if is_users else None
        if before is not None and asked.rule != before and not has_news and step > asked.last + 1:
            logger.warning(
                "the loss has another form at step %d than at step %d; batches in between were "
                "weighed by the old one. "
                "Set num_microbatch=1 for a loss that changes at some step",
                step,
                asked.last,
            )
        asked = replace(asked, last=step) if is_due else asked
        self._asked[mode] = asked
        return KEEP_WHOLE if not can_cut or asked.rule is None else asked.rule

    def _reads_only_losses(self, engine: RoundPipe, batches: Sequence[StashedBatch]) -> bool:
        """Whether nobody looks at logits, and the model is one whose preset need not make them.

        Not where a loss is divided by nothing: the gradients of masked rows are zero even then if
        there are logits.
        """
        trainer = self._trainer
        return (
            not self._is_users()
            and trainer.label_smoother is None
            and type(trainer.answer) is ModelAnswer
            and makes_causal_loss(base_model(trainer.model))
            and all(batch.num_items is not None and bool(batch.num_items > 0) for batch in batches)
            and runs_by_preset(engine)
        )

    def _is_users(self) -> bool:
        return not self._trainer.has_stock_loss() or self._trainer.compute_loss_func is not None

    def _is_known_to_add_up(self, batches: Sequence[StashedBatch]) -> bool:
        has_items = all(batch.num_items is not None for batch in batches)
        return not self._is_users() and loss_adds_up(self._trainer) and has_items

    def _learn(
        self, engine: RoundPipe, batch: StashedBatch, call: ModelCall, asked: Asked
    ) -> LossRule | None:
        """Asks the loss (see loss_rule.py) with forwards of a few rows; draws no random numbers.

        ``asked``: what it has answered so far, whose forms stay. Returns that where this batch
        cannot tell.
        """
        before = asked.rule
        rows = telling_rows(batch.inputs, asked.shown)
        if not rows:
            return before
        sample = sample_of(batch.inputs, rows)
        try:
            rule = self._answer(engine, batch, sample)
        except _CannotAnswer as failure:
            try:
                self._answer(engine, batch, sample)
            except _CannotAnswer:
                logger.warning("the loss cannot be asked about a few rows: %r", failure.__cause__)
                rule = KEEP_WHOLE
            else:
                raise (
                    failure.__cause__ or failure
                ) from None  # it came once, so it is none of the number of rows
        if rule is None:
            return before
        if before is not None:
            rule = either(before, rule)
        if rule.has_sum and rule.mean_over is not None and call.num_items is not None:
            # Because the model mixes both parts into one loss, which cannot be taken apart later.
            rule = KEEP_WHOLE
        if rule == KEEP_WHOLE != before:
            logger.warning(
                "the loss of a batch is no sum or mean over its rows, so batches are not cut into "
                "microbatches; "
                "use gradient accumulation to keep several devices busy"
            )
        return rule

    def _answer(
        self, engine: RoundPipe, batch: StashedBatch, sample: Mapping[str, Any]
    ) -> LossRule | None:
        trainer = self._trainer
        is_exact = trainer.precision().autocast is None and all(
            parameter.dtype.itemsize >= 4
            for parameter in trainer.model.parameters()
            if parameter.is_floating_point()
        )
        tolerance = TOLERANCE if is_exact else TOLERANCE_BELOW_FP32
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return learn_rule(
                sample,
                lambda inputs: self._evaluate(engine, inputs, batch),
                self._measure,
                tolerance,
            )

    def _evaluate(
        self, engine: RoundPipe, inputs: Mapping[str, Any], batch: StashedBatch
    ) -> Evaluated:
        once = self._loss_of(engine, inputs, batch.num_items)
        return Evaluated(
            once,
            None if batch.num_items is None else self._loss_of(engine, inputs, batch.num_items * 2),
        )

    def _loss_of(
        self, engine: RoundPipe, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None
    ) -> float:
        """The loss sees the mode of the run, the model runs without dropout: else no two losses
        could be compared."""
        trainer = self._trainer
        mode = trainer.model.training
        is_running = has_run = False

        def run(**given: Any) -> Any:
            nonlocal is_running, has_run
            is_running = True
            if has_run:
                trainer.answer.repeat()  # as in the worker
            has_run = True
            engine.eval()
            try:
                outputs = trainer.stand_in(num_microbatch=1)(**given)
            finally:
                engine.train(mode)
            is_running = False
            return outputs

        model = EngineStandIn(trainer.model, run)
        try:
            with losses_on(HOST):
                return float(
                    trainer.compute_loss(model, copied(inputs), num_items_in_batch=num_items)
                )
        except Exception as error:
            if is_running:
                raise
            raise _CannotAnswer from error

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
