"""The accumulation window: batches wait until it closes, go down as one pipeline round, and are
stepped with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from roundpipe import (
    AutoRoundPipe,
    GradScaler,
    OptimizerCtx,
    RoundPipe,
    RoundPipeRunConfig,
    StepHandle,
)
from roundpipe.errors import ConfigError
from roundpipe.microbatch.sizes import tensor_leaves

from ..arguments import LossReduction, pipeline_of
from ..compat import tell_skipped
from ..engine.calls import LossFn, cuts_batches
from ..engine.optimizer import PipelineOptimizer
from ..engine.out_of_memory import Footprint, OutOfMemoryBackoff
from ..engine.watchers import (
    Shown,
    has_own,
    reads_gradients,
    reads_weights,
    refuse_written,
    show_gradients,
)
from ..loss.fused import FusedLoss
from ..loss.gradients import LossGradients
from ..loss.round import StashedBatch, most_parts, rows_of
from ..loss.whole import WholeBatchLoss

if TYPE_CHECKING:
    from .mixin import RoundPipeTrainerMixin

Round = list[StashedBatch]
T = TypeVar("T")


class AccumulationWindow:
    """Used by the user's thread only.

    [Note: again] Where memory runs out, all rounds since the last step run again, because late
    stage runs of one may have failed behind the others: their gradients are dropped first, and
    those of the loss's own parameters put back, and what losses have counted, so nothing is counted
    twice. Batches are kept until the step has them. Random numbers are those of the first attempt:
    a call in which a layer drew has no late stage runs.
    """

    def __init__(self, trainer: "RoundPipeTrainerMixin") -> None:
        self._trainer = trainer
        self._loss_gradients = LossGradients()
        self._fused = FusedLoss(trainer)
        self._whole = WholeBatchLoss(trainer, self._loss_gradients)
        self._batches: Round = []
        self._since_step: list[Round] = []
        self._shown: list[Shown] = []
        self._largest_offloaded = 0
        self._counted: Any = None  # by losses, before the first round since the last step
        self._training, self._evaluation = (
            OutOfMemoryBackoff("training"),
            OutOfMemoryBackoff("evaluation"),
        )

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def has_run(self) -> bool:
        """Whether some round since the last step has left gradients."""
        return bool(self._since_step)

    def add(self, batch: StashedBatch) -> None:
        self._batches.append(batch)

    def forget(self) -> None:
        """Drops batches and all that is known of the loss: a new run starts."""
        self._batches.clear()
        self._since_step.clear()
        self._shown = []
        self._fused.forget()
        self._whole.forget()
        self._loss_gradients.forget()
        self._loss_gradients.take_penalties()

    def run(self, engine: RoundPipe) -> list[torch.Tensor]:
        """Trains on the stashed batches in one round. Returns each batch's loss; the window is
        empty afterwards, also after an error."""
        batches, self._batches = self._batches, []
        rounds = [*self._since_step, batches]
        if not self._since_step:
            self._counted = self._trainer.counted_by_losses()
            self._show_weights(engine, batches)
        attempts = 0

        def attempt(footprint: Footprint) -> list[torch.Tensor]:
            nonlocal attempts
            attempts += 1
            return (
                self._run(engine, batches, footprint)
                if attempts == 1
                else self._again(engine, rounds, footprint)
            )

        losses = self._attempted(engine, rounds, attempt)
        if self._trainer.is_in_loop:
            self._since_step = rounds
        else:
            self._loss_gradients.forget()
        return losses

    def _show_weights(self, engine: RoundPipe, batches: Round) -> None:
        """Waits for the update in the model, where a loss of the user's may read weights there
        before it calls the model."""
        trainer = self._trainer
        if (
            not pipeline_of(trainer.args).async_optimizer
            and has_own(trainer, "compute_loss")
            and self._reduction(engine, batches) is None
        ):
            engine.synchronize()

    def before_step(self) -> None:
        """Before the callbacks that come before the step: some look at its gradients."""
        penalties = self._loss_gradients.penalties
        if reads_gradients(self._trainer):
            self._shown = show_gradients(self._trainer, penalties)
        else:
            self._shown = []

    def hand_over(self, optimizer: PipelineOptimizer) -> StepHandle:
        """Steps with what the rounds left; where one ran out of memory behind our back, runs them
        again first."""
        engine, rounds = optimizer.engine, self._since_step
        refuse_written(self._shown)
        self._shown = []
        if optimizer.is_async:
            self._wait_for_the_largest(rounds)
        attempts = 0

        def attempt(footprint: Footprint) -> StepHandle | Exception:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                self._again(engine, rounds, footprint)
            try:
                return optimizer.submit(self._loss_gradients.penalties)
            except Exception as error:
                if optimizer.has_begun or not rounds:
                    return error  # nothing to do with the rounds, or nothing to run again
                raise

        done = self._attempted(engine, rounds, attempt)
        self._since_step = []
        self._loss_gradients.forget()
        self._loss_gradients.take_penalties()
        if isinstance(done, Exception):
            raise done
        return done

    def stepped(self, optimizer: PipelineOptimizer) -> None:
        """The update was handed over: Trainer goes on to its scheduler and its callbacks."""
        trainer = self._trainer
        tell_skipped(trainer.optimizer, optimizer.was_skipped)
        if not optimizer.is_async and reads_weights(trainer):
            optimizer.engine.synchronize()

    def evaluate(
        self, engine: RoundPipe, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None
    ) -> torch.Tensor | None:
        """The batch's loss, its outputs dropped where they were made. None for a loss that has to
        see whole batches."""
        batches = [StashedBatch(inputs, num_items, divisor=1)]
        reduction = self._reduction(engine, batches)
        if reduction is None:
            return None

        def attempt(footprint: Footprint) -> torch.Tensor:
            microbatches, loss_fn = self._fused.cut(
                engine, batches, reduction, footprint.num_microbatch
            )
            with self._trainer.precision().in_model():
                loss: torch.Tensor
                (loss,) = engine.forward_loss(microbatches=microbatches, loss_fn=loss_fn)
            return loss

        loss: torch.Tensor = self.evaluating(engine, attempt, lambda: most_parts(inputs))
        return loss

    def evaluating(
        self, engine: RoundPipe, attempt: Callable[[Footprint], Any], most: Callable[[], int]
    ) -> Any:
        """A call without gradients, which can only be cut finer."""
        start = Footprint(
            num_microbatch=engine.default_num_microbatch, recompute_grain="layer", is_joined=False
        )
        return self._evaluation.run(engine, start, most, attempt)

    def _attempted(
        self, engine: RoundPipe, rounds: Sequence[Round], attempt: Callable[[Footprint], T]
    ) -> T:
        try:
            return self._training.run(
                engine, self._start(engine, rounds), lambda: self._most(engine, rounds), attempt
            )
        except Exception:
            self._loss_gradients.restore()  # because a smaller batch may be tried next
            raise

    def _start(self, engine: RoundPipe, rounds: Iterable[Round]) -> Footprint:
        grain: Any = pipeline_of(self._trainer.args).recompute_grain
        is_fused = all(self._reduction(engine, batches) is not None for batches in rounds)
        together = max((len(batches) for batches in rounds), default=1) if is_fused else 1
        return Footprint(
            num_microbatch=engine.num_microbatch_of_each(together),
            recompute_grain=grain or "stage",
            is_joined=True,
            keeps_graphs=not is_fused,
        )

    def _most(self, engine: RoundPipe, rounds: Iterable[Round]) -> int:
        return max(self._most_of(engine, batches) for batches in rounds)

    def _most_of(self, engine: RoundPipe, batches: Round) -> int:
        if self._reduction(engine, batches) is not None:
            return max(most_parts(batch.inputs) for batch in batches)
        is_cut = cuts_batches(engine)
        return max(rows_of(batch.inputs) for batch in batches) if is_cut else 1

    def _reduction(self, engine: RoundPipe | AutoRoundPipe, batches: Round) -> LossReduction | None:
        """A model that runs in parts has no last stage that a loss could be fused with."""
        if isinstance(engine, AutoRoundPipe):
            return None
        return self._fused.reduction(engine, batches)

    def _again(
        self, engine: RoundPipe, rounds: Iterable[Round], footprint: Footprint
    ) -> list[torch.Tensor]:
        """The losses of the last round. See [Note: again]."""
        engine.zero_grad()
        self._loss_gradients.restore()
        self._trainer.count_again_from(self._counted)
        losses: list[torch.Tensor] = []
        for batches in rounds:
            losses = self._run(engine, batches, footprint)
        return losses

    def _run(self, engine: RoundPipe, batches: Round, footprint: Footprint) -> list[torch.Tensor]:
        calls = [batches] if footprint.is_joined else [[batch] for batch in batches]
        return [loss for call in calls for loss in self._forward_backward(engine, call, footprint)]

    def _forward_backward(
        self, engine: RoundPipe, batches: Round, footprint: Footprint
    ) -> list[torch.Tensor]:
        reduction = self._reduction(engine, batches)
        if reduction is None:
            losses = [self._whole.forward_backward(engine, batch, footprint) for batch in batches]
        else:
            losses = self._fused_forward_backward(engine, batches, reduction, footprint)
        return losses

    def _fused_forward_backward(
        self, engine: RoundPipe, batches: Round, reduction: LossReduction, footprint: Footprint
    ) -> list[torch.Tensor]:
        trainer = self._trainer
        scaler = trainer.scaler
        microbatches, loss_fn = self._fused.cut(
            engine, batches, reduction, footprint.num_microbatch
        )
        config = RoundPipeRunConfig(recompute_grain=footprint.recompute_grain)
        with trainer.precision().in_model():
            losses: list[torch.Tensor] = engine.forward_backward(
                microbatches=microbatches,
                loss_fn=self._loss_gradients.noted(
                    loss_fn if scaler is None else _scaled(loss_fn, scaler)
                ),
                run_config=config,
                is_last=batches[-1].syncs,
            )
        self._refuse_gradients_of_the_model(engine)
        return losses if scaler is None else [loss / scaler.get_scale() for loss in losses]

    def _refuse_gradients_of_the_model(self, engine: RoundPipe) -> None:
        """The engine computes with copies of the weights; a gradient of the model's own would
        silently be lost."""
        named = engine.model.named_parameters() if self._loss_gradients.are_noted else ()
        for name, parameter in named:
            if parameter in self._loss_gradients:
                engine.zero_grad()
                raise ConfigError(
                    f"a loss with a loss_reduction computes with the model's own parameter "
                    f"{name!r}, whose gradient would be lost: the pipeline works on copies. Leave "
                    "loss_reduction out, or take the penalty into the optimizer, as weight_decay is"
                )

    def _wait_for_the_largest(self, rounds: Iterable[Round]) -> None:
        """Waits for late stage runs of a round larger than all before, which are those that may run
        out of memory.

        Because what fails behind an asynchronous step can no longer be run again before it.
        """
        size = max((_elements(batch) for batches in rounds for batch in batches), default=0)
        if size > self._largest_offloaded:
            with OptimizerCtx():  # waits, and writes back nothing
                self._largest_offloaded = size


def _scaled(loss_fn: LossFn, scaler: GradScaler) -> LossFn:
    def scaled(outputs: Any, label: Any) -> Sequence[torch.Tensor]:
        losses: Sequence[torch.Tensor] = scaler.scale(loss_fn(outputs, label))
        return losses

    return scaled


def _elements(batch: StashedBatch) -> int:
    return sum(map(torch.Tensor.numel, tensor_leaves(list(batch.inputs.values()))))
