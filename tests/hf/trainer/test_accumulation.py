"""An accumulation window is one pipeline round; all that a user sees is as if its batches had been
run in turn."""

from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    assert_same,
    assert_same_weights,
    differ,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
    train_both,
    trained,
    weights,
)


class Rounds:
    """Counts the engine's rounds and the microbatches in them."""

    def __init__(self, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        engine = trainer._wrap_model(trainer.model, training=False)
        run = engine.forward_backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.sizes.append(len(kwargs["microbatches"]))
            return run(*args, **kwargs)

        monkeypatch.setitem(engine.__dict__, "forward_backward", counted)


def test_a_window_is_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 batches of 3 (the last of 2) in windows of 4: rounds of 4 and 3 batches, two microbatches
    each."""
    settings = {"gradient_accumulation_steps": 4, "devices": 1, "num_microbatch": 2}
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), token_rows(20), **settings)
    rounds = Rounds(trainer, monkeypatch)
    trainer.train()
    assert rounds.sizes == [8, 6]


@pytest.mark.slow
def test_however_a_batch_is_cut_it_has_one_token_mean() -> None:
    """Rows of 2, 5, 9 and 11 labels as one batch in 1, 2 or 4 microbatches, or accumulated one by
    one."""
    rows, losses, results = token_rows(4, kept=(2, 5, 9, 11)), [], []
    plain = trained(Trainer, MODELS["full"](), rows, per_device_train_batch_size=4)
    ways = [(4, 1, 1), (4, 1, 2), (4, 1, 4), (1, 4, 4)]
    for batch_size, accumulation, microbatches in ways:
        trainer = trained(
            RoundPipeTrainer,
            MODELS["full"](),
            rows,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            num_microbatch=microbatches,
        )
        losses.append(logged(trainer)[0]["loss"])
        results.append(weights(trainer))
    assert losses == pytest.approx([logged(plain)[0]["loss"]] * 4, abs=1e-6)
    for result in results:
        assert_same_weights(result, weights(plain))


class OwnLoss:
    share = 1.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return self.share * model(**inputs).loss


@pytest.mark.parametrize("is_scaled", [None, True, False])
def test_a_loss_may_say_whether_it_is_scaled(
    monkeypatch: pytest.MonkeyPatch, is_scaled: bool | None
) -> None:
    """transformers asks since 5.19, and TRL's trainers answer. Of two batches in a window plain
    Trainer does not divide a loss that was given the number of items, on any version."""
    monkeypatch.setattr(Trainer, "loss_is_scaled_for_ga", None, raising=False)
    plain = type("Plain", (OwnLoss, Trainer), {"share": 0.5 if is_scaled is False else 1.0})
    ours = type("Ours", (OwnLoss, RoundPipeTrainer), {"loss_is_scaled_for_ga": is_scaled})
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "learning_rate": 0.05}
    of_plain, of_ours = (
        trained(kind, MODELS["full"](), token_rows(12), **settings) for kind in (plain, ours)
    )
    assert_same_weights(weights(of_ours), weights(of_plain))
    ours_logged, plain_logged = (
        [one["loss"] for one in logged(each) if "loss" in one] for each in (of_ours, of_plain)
    )
    assert ours_logged == pytest.approx(plain_logged, abs=1e-6)


@pytest.mark.parametrize("count", [6, 3])
def test_a_short_window_has_its_own_token_mean(count: int) -> None:
    """Batches of 1, accumulation 4. 6 rows are windows of 4 and 2 in each epoch; 3 rows one
    window."""
    pair = train_both(
        MODELS["full"],
        token_rows(count),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_train_epochs=2,
        max_grad_norm=0.0,
    )
    assert_same(pair)
    assert pair.ours.state.global_step == 2 * -(-count // 4)


@pytest.mark.parametrize(
    ("kept", "batch"),
    [
        pytest.param((12, 0, 7, 0), 4, id="a-some-rows-masked"),
        pytest.param((0,), 4, id="b-all-rows-masked"),
        pytest.param((2, 5, 9, 11, 12), 5, id="c-five-rows-four-microbatches"),
        pytest.param((9,), 1, id="d-one-row-four-microbatches"),
    ],
)
def test_masked_and_odd_batches(kept: tuple[int, ...], batch: int) -> None:
    """Microbatches without a label, fewer rows than microbatches, rows that do not divide."""
    rows = token_rows(2 * batch, kept)
    pair = train_both(MODELS["full"], rows, per_device_train_batch_size=batch, num_microbatch=4)
    assert_same(pair)
    assert all(bool(weight.isfinite().all()) for weight in weights(pair.ours).values())


def test_nan_of_one_batch_is_filtered_alone() -> None:
    """The filter replaces the loss of a batch, not of a window: a masked batch among good ones
    gives nan for itself where its loss does not divide by the window's tokens."""
    rows = token_rows(12, (12, 12, 12, 0, 0, 0))
    for is_filtered in (True, False):
        pair = train_both(
            MODELS["full"],
            rows,
            MeanLoss,
            gradient_accumulation_steps=2,
            logging_nan_inf_filter=is_filtered,
            train_sampling_strategy="sequential",
        )
        assert_same(pair)


class MeanLoss:
    """The mean over the batch's tokens, nan where there is none."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_substeps_log_epochs_and_totals_as_plain() -> None:
    """Logging once per epoch or every two steps over windows of three changes no sum."""
    for settings in ({"logging_strategy": "epoch"}, {"logging_steps": 2}):
        pair = train_both(
            MODELS["full"],
            token_rows(20),
            gradient_accumulation_steps=3,
            num_train_epochs=2,
            **settings,
        )
        assert_same(pair)


class StopIn(TrainerCallback):
    """Asks to stop after a substep, in the middle of a window."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        if state.global_step == 1:
            setattr(control, self.what, True)
        return control


@pytest.mark.parametrize("what", ["should_training_stop", "should_epoch_stop"])
def test_stopping_in_a_window_counts_its_losses(what: str) -> None:
    pair = make_both(
        MODELS["full"],
        token_rows(20),
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        max_grad_norm=0,
    )
    for trainer in pair:
        trainer.add_callback(StopIn(what))
        run(trainer)
    assert_same(pair)


def test_a_training_step_of_its_own() -> None:
    """Outside `train()` and before there is an optimizer: the loss comes back, gradients appear on
    the model."""
    pair = make_both(MODELS["full"], token_rows(3))
    losses = []
    for trainer in pair:
        torch.manual_seed(0)
        batch = next(iter(trainer.get_train_dataloader()))
        count = (batch["labels"][:, 1:] != -100).sum()
        losses.append(trainer.training_step(trainer.model, batch, num_items_in_batch=count))
    torch.testing.assert_close(losses[0], losses[1])
    pair.ours.synchronize()
    assert_same_weights(
        *({n: p.grad for n, p in trainer.model.named_parameters()} for trainer in pair), atol=1e-6
    )


def test_counting_and_progress() -> None:
    pair = train_both(
        MODELS["full"],
        token_rows(20),
        gradient_accumulation_steps=4,
        max_steps=5,
        include_num_input_tokens_seen="all",
    )
    assert_same(pair)
    assert pair.ours.state.num_input_tokens_seen == pair.plain.state.num_input_tokens_seen
    assert pair.ours.state.total_flos == pair.plain.state.total_flos


def test_the_same_numbers_on_any_number_of_devices() -> None:
    """Bitwise, given the same number of microbatches."""
    runs = [
        trained(
            RoundPipeTrainer,
            MODELS["tied"](),
            token_rows(20),
            devices=devices,
            num_microbatch=2,
            gradient_accumulation_steps=2,
        )
        for devices in (1, 3)
    ]
    assert logged(runs[0]) == logged(runs[1])
    assert differ(weights(runs[0]), weights(runs[1])) == []
