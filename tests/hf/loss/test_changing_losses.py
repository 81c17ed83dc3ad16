"""A loss that is another one later, or in another mode, is still the plain Trainer's loss of the
whole batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LabelSmoother

from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    make_both,
    run,
    token_rows,
    train_both,
    trained,
)

ROWS = token_rows(20)


def token_sum(outputs: Any, labels: Tensor) -> Tensor:
    return cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def contrast(outputs: Any) -> Tensor:
    pooled = outputs.logits.mean(dim=1)
    return cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


class Loss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = self.loss_of(model, outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
        raise NotImplementedError


class FromSumToMean(Loss):
    state: Any

    def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
        share = min(self.state.global_step / 3, 1.0)
        return (1 - share) * token_sum(outputs, labels) / num_items + share * token_mean(
            outputs, labels
        )


class WarmedUp(Loss):
    """A term that depends on all rows together comes in bit by bit."""

    state: Any

    def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
        return token_mean(outputs, labels) + 0.1 * self.state.global_step * contrast(outputs)


class InTrainingOnly(Loss):
    def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
        return token_mean(outputs, labels) + (contrast(outputs) if model.training else 0.0)


class InEvaluationOnly(Loss):
    model: Any

    def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
        return token_mean(outputs, labels) + (0.0 if self.model.training else contrast(outputs))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss", [FromSumToMean, WarmedUp, InTrainingOnly, InEvaluationOnly])
def test_a_loss_that_depends_on_the_step_or_on_the_mode(loss: type, accumulation: int) -> None:
    """Its form was looked at once, in evaluation mode, at the first step."""
    settings = {
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
    }
    assert_same(
        train_both(
            MODELS["full"], ROWS, loss, eval_dataset=ROWS[:5], eval_strategy="epoch", **settings
        )
    )


class Then(TrainerCallback):  # type: ignore[misc]  # untyped base
    """Does something to its trainer after the second step."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.trainer: Any = None
        self.change = change

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.change(self.trainer)


def smooth(trainer: Any) -> None:
    trainer.label_smoother = LabelSmoother(epsilon=0.3)


def take_the_mean(trainer: Any) -> None:
    trainer.compute_loss_func = token_mean


def bind_another_compute_loss(trainer: Any) -> None:
    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return token_mean(model(**inputs), inputs["labels"])

    trainer.compute_loss = compute_loss


@pytest.mark.parametrize("change", [smooth, take_the_mean, bind_another_compute_loss])
def test_a_callback_gives_the_trainer_another_loss(change: Callable[[Any], None]) -> None:
    """How the loss before reduced its rows says nothing of this one."""
    pair = make_both(MODELS["full"], ROWS)
    for trainer in pair:
        callback = Then(change)
        callback.trainer = trainer
        trainer.add_callback(callback)
    assert_same(Pair(*map(run, pair)))


def test_another_loss_between_two_evaluations() -> None:
    pair = make_both(MODELS["full"], ROWS[:5], eval_dataset=ROWS[:5], per_device_eval_batch_size=5)
    for loss in (
        None,
        token_mean,
        lambda outputs, labels, num_items_in_batch=None: contrast(outputs),
    ):
        for trainer in pair:
            trainer.compute_loss_func = loss
        ours, plain = (trainer.evaluate()["eval_loss"] for trainer in pair)
        np.testing.assert_allclose(ours, plain, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_form_that_comes_late(accumulation: int) -> None:
    """Batches between two looks at the loss were weighed by its old form."""

    class Late(Loss):
        state: Any

        def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
            return token_mean(outputs, labels) + (
                contrast(outputs) if self.state.global_step >= 3 else 0.0
            )

    assert_same(train_both(MODELS["full"], ROWS, Late, gradient_accumulation_steps=accumulation))


def test_updates_are_as_late_however_batches_are_cut() -> None:
    """A question about the loss waited for the update in flight."""
    runs = [
        trained(
            type("Mixed", (WarmedUp, RoundPipeTrainer), {}),
            MODELS["full"](),
            ROWS,
            devices=devices,
            num_microbatch=num_microbatch,
            async_optimizer=True,
        )
        for devices, num_microbatch in ((1, 1), (3, 3))
    ]
    assert_same(Pair(*runs))


def test_a_loss_that_needs_more_than_two_rows() -> None:
    """It was asked about two rows, and what it raised there ended the run."""

    class Quadruples(Loss):
        def loss_of(self, model: Any, outputs: Any, labels: Tensor, num_items: Any) -> Tensor:
            one, like, other, unlike = (
                outputs.logits.mean(dim=1).view(-1, 4, outputs.logits.shape[-1]).unbind(1)
            )
            return (one - like).square().mean() - (other - unlike).square().mean()

    assert_same(train_both(MODELS["full"], ROWS[:16], Quadruples, per_device_train_batch_size=8))
