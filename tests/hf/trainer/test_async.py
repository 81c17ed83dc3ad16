"""``async_optimizer=True``: gradients are exactly one step old, however slow the optimizer, and
every look flushes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from roundpipe_hf import RoundPipeTrainer
from tests.support.optimizers import PausingSGD, every_third, random_delays
from tests.support.trainers import (
    MODELS,
    assert_same_weights,
    differ,
    logged,
    make_trainer,
    run,
    token_rows,
    trained,
    weights,
)

ROWS = token_rows(18)
SETTINGS: dict[str, Any] = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.0}


def one_step_stale(flushed_after: tuple[int, ...] = ()) -> tuple[dict[str, Tensor], list[float]]:
    """The gradient of step t is taken at W_max(t-2, s) and applied to W_(t-1), s being the last
    flushed step."""
    model = MODELS["full"]()
    trainer = make_trainer(Trainer, model, ROWS, **SETTINGS)
    batches = list(trainer.get_train_dataloader())
    history = [weights(trainer)]
    losses, last_flush = [], 0
    for step, batch in enumerate(batches, start=1):
        load(model, history[max(step - 2, last_flush)])
        count = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**batch, num_items_in_batch=count).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rate = 0.1 * (1 - (step - 1) / len(batches))
        history.append(
            {
                name: w - rate * g
                for (name, w), g in zip(history[step - 1].items(), gradients, strict=True)
            }
        )
        losses.append(loss.item())
        last_flush = step if step in flushed_after else last_flush
    return history[-1], losses


@torch.no_grad()
def load(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


@pytest.mark.parametrize(
    "pause",
    [
        pytest.param(None, id="fast"),
        pytest.param(random_delays(0), id="random", marks=pytest.mark.slow),
        pytest.param(every_third(), id="every-third"),
    ],
)
def test_staleness_is_one_step(pause: Any) -> None:
    """The rate of each step is its own, though the scheduler has moved on when a slow update reads
    it."""
    cls_and_kwargs = (PausingSGD, {"lr": 0.1, "pause": pause or (lambda: None)})
    trainer = trained(
        RoundPipeTrainer,
        MODELS["full"](),
        ROWS,
        async_optimizer=True,
        devices=2,
        optimizer_cls_and_kwargs=cls_and_kwargs,
        logging_strategy="no" if pause else "steps",
        **SETTINGS,
    )
    expected, losses = one_step_stale()
    assert_same_weights(weights(trainer), expected, atol=1e-6)
    if pause is None:
        assert [entry["loss"] for entry in logged(trainer)[:-1]] == pytest.approx(losses, abs=1e-5)


def test_evaluating_flushes() -> None:
    trainer = trained(
        RoundPipeTrainer,
        MODELS["full"](),
        ROWS,
        async_optimizer=True,
        eval_dataset=ROWS[:3],
        eval_strategy="steps",
        eval_steps=2,
        **SETTINGS,
    )
    assert_same_weights(weights(trainer), one_step_stale(flushed_after=(2, 4, 6))[0], atol=1e-6)


def test_the_end_of_training_flushes() -> None:
    trainer = trained(RoundPipeTrainer, MODELS["full"](), ROWS, async_optimizer=True, **SETTINGS)
    at_the_end = weights(trainer)
    trainer.synchronize()
    assert differ(weights(trainer), at_the_end) == []


def test_logging_a_norm_waits_for_its_step() -> None:
    """Clipped steps log the norm before clipping."""
    settings = SETTINGS | {"max_grad_norm": 0.5}
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, async_optimizer=True, logging_steps=3, **settings
    )
    run(trainer)
    norms = [entry["grad_norm"] for entry in logged(trainer)[:-1]]
    assert len(norms) == 2
    assert all(isinstance(norm, float) and norm > 0.5 for norm in norms)
