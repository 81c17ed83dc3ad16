"""The rest of what the public test suite of `Trainer` checks, each against the plain Trainer on the
same seed.

docs/trainer-support.md says which row of that suite each test shows.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)
from transformers.testing_utils import CaptureLogger
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import logging as transformers_logging

from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    assert_same_logs,
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

ROWS = token_rows(12)
EVERY_STEP: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
EVALUATED: dict[str, Any] = {"eval_dataset": ROWS[:4], "eval_strategy": "steps", "eval_steps": 1}


class NotANumber:
    """The loss of the third batch is nan."""

    def compute_loss(
        self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Tensor:
        loss: Tensor = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        return loss * float("nan") if self.state.global_step == 1 else loss  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_filter", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_losses_that_are_no_numbers_are_filtered_from_the_log(has_filter: bool) -> None:
    settings: dict[str, Any] = {
        "logging_nan_inf_filter": has_filter,
        "logging_steps": 2,
        "learning_rate": 0.0,
    }
    pair = train_both(MODELS["full"], ROWS, NotANumber, gradient_accumulation_steps=2, **settings)
    ours, plain = ([entry.get("loss") for entry in logged(trainer)] for trainer in pair)
    assert ours == pytest.approx(plain, abs=1e-5, nan_ok=True)
    assert np.isnan(ours[0]) == (not has_filter)


@pytest.mark.slow
def test_early_stopping_and_limits_on_checkpoints() -> None:
    """A rate that makes things worse: both stop at the same step, keep the same checkpoints and
    load the best."""
    settings: dict[str, Any] = (
        EVALUATED
        | EVERY_STEP
        | {
            "learning_rate": 3.0,
            "max_grad_norm": 0.0,
            "num_train_epochs": 4,
            "metric_for_best_model": "eval_loss",
            "load_best_model_at_end": True,
            "save_total_limit": 1,
        }
    )
    trainers = [
        trained(cls, MODELS["full"](), ROWS, callbacks=[EarlyStoppingCallback(2)], **settings)
        for cls in (RoundPipeTrainer, Trainer)
    ]
    ours, plain = trainers
    assert ours.state.global_step == plain.state.global_step < 16
    assert ours.state.best_global_step == plain.state.best_global_step
    folders = [
        sorted(path.name for path in Path(name).iterdir()) for name in ("out-ours", "out-plain")
    ]
    assert folders[0] == folders[1]
    for trainer in trainers:
        best = f"{trainer.args.output_dir}/checkpoint-{trainer.state.best_global_step}"
        state = json.loads(
            Path(trainer.args.output_dir, folders[0][-1], "trainer_state.json").read_text()
        )
        assert state["best_model_checkpoint"] == trainer.state.best_model_checkpoint == best
    assert_same(Pair(ours, plain), atol=1e-4)  # such a rate enlarges rounding, too


class Counts(TrainerCallback, ExportableState):
    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


@pytest.mark.slow
def test_resuming_with_another_batch_size_from_shards_with_a_callbacks_state() -> None:
    """The new batch size counts, sharded weights load, the callback goes on; log and weights are
    the plain ones."""
    trainers = []
    for cls in (RoundPipeTrainer, Trainer):
        first = trained(
            cls, MODELS["full"](), ROWS, callbacks=[Counts()], max_steps=2, **EVERY_STEP
        )
        folder = Path(first.args.output_dir) / "checkpoint-2"
        (folder / "model.safetensors").unlink()
        first.model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()
        again = make_trainer(
            cls,
            MODELS["full"](),
            ROWS,
            callbacks=[Counts()],
            per_device_train_batch_size=2,
            max_steps=5,
            restore_callback_states_from_checkpoint=True,
        )
        trainers.append(run(again, resume_from_checkpoint=str(folder)))
        assert next(c for c in again.callback_handler.callbacks if isinstance(c, Counts)).count == 5
    assert_same(Pair(*trainers))


@pytest.mark.slow
def test_clear_errors_when_there_is_nothing_to_resume_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, max_steps=1, **EVERY_STEP)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        trainer.train(resume_from_checkpoint="out-ours/checkpoint-bogus")
    trainer.train(resume_from_checkpoint=False)
    other = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, max_steps=2, logging_steps=7, save_steps=3
    )
    with caplog.at_level(logging.WARNING):
        other.train(resume_from_checkpoint=True)
    assert "logging_steps: 7 (from args) != 1 (from trainer_state.json)" in caplog.text
    assert other.state.global_step == 2


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows without a length, with a column that the model does not take."""

    def __iter__(self) -> Any:
        return iter([row | {"extra": 1.0} for row in ROWS[:11]])


@pytest.mark.slow
def test_data_without_a_length_or_a_dataset() -> None:
    """Iterable rows for training, evaluation and prediction, the last batch partial; loaders that
    are only iterable."""
    pair = train_both(
        MODELS["full"], Stream(), max_steps=6, eval_dataset=Stream(), per_device_eval_batch_size=2
    )
    assert_same(pair)
    ours, plain = (trainer.predict(Stream()).predictions for trainer in pair)
    np.testing.assert_allclose(ours, plain, atol=1e-5)

    class Loader:
        def __iter__(self) -> Any:
            return iter(DataLoader(ROWS, batch_size=3))  # type: ignore[arg-type]

    class Loads:
        def get_train_dataloader(self) -> Any:
            return Loader()

        def get_eval_dataloader(self, *_: Any) -> Any:
            return Loader()

    assert_same(
        train_both(
            MODELS["full"],
            None,
            Loads,
            max_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            eval_dataset=[],
        )
    )


def token_accuracy(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
    """Over all batches, if called for each."""
    guessed, labels = (
        torch.as_tensor(array) for array in (prediction.predictions, prediction.label_ids)
    )
    token_accuracy.hits.append((guessed[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100].float())  # type: ignore[attr-defined]
    if not compute_result:
        return {}
    hits = torch.cat(token_accuracy.hits)  # type: ignore[attr-defined]
    token_accuracy.hits.clear()  # type: ignore[attr-defined]
    return {"accuracy": float(hits.mean()), "losses": float(np.mean(prediction.losses or [0.0]))}


token_accuracy.hits = []  # type: ignore[attr-defined]


@pytest.mark.slow
def test_metrics_batch_by_batch_and_with_losses() -> None:
    settings: dict[str, Any] = {
        "batch_eval_metrics": True,
        "compute_metrics": token_accuracy,
        "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1),
        "eval_dataset": {"a": ROWS[:5], "b": ROWS[5:]},
        "per_device_eval_batch_size": 2,
        "skip_memory_metrics": False,
        "dataloader_num_workers": 0,
    }
    pair = make_both(MODELS["full"], ROWS, **settings)
    ours, plain = (trainer.evaluate() for trainer in pair)
    assert list(ours) == list(plain)
    compared = [key for key in plain if key.endswith(("_loss", "_accuracy", "_losses"))]
    assert len(compared) == 6
    assert {key for key in plain if "mem_cpu" in key}, "memory is reported as well"
    for key in compared:
        assert ours[key] == pytest.approx(plain[key], abs=1e-5), key


@pytest.mark.slow
def test_steps_epochs_and_the_logging_interval() -> None:
    """Parts of epochs, windows longer than the loader, an override by max_steps, an interval that
    divides nothing."""
    for settings in (
        {"num_train_epochs": 1.5, "logging_steps": 3},
        {"gradient_accumulation_steps": 8, "num_train_epochs": 2},
        {"max_steps": 7, "num_train_epochs": 1},
    ):
        assert_same(train_both(MODELS["lora"], ROWS, **settings))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_accelerators_options_are_the_plain_trainers() -> None:
    """Options that say how data is handed out arrive; those that conflict raise as they do
    there."""

    def options(
        **accumulation: Any,
    ) -> dict[str, Any]:  # anew each time, because Trainer writes to it
        handed_out = {"split_batches": True, "even_batches": False, "use_seedable_sampler": False}
        return {"accelerator_config": handed_out | {"gradient_accumulation_kwargs": accumulation}}

    trainers = [
        trained(
            cls,
            MODELS["full"](),
            ROWS,
            gradient_accumulation_steps=2,
            **options(sync_each_batch=True),
        )
        for cls in (RoundPipeTrainer, Trainer)
    ]
    assert_same(Pair(*trainers))
    for name in ("split_batches", "even_batches", "use_seedable_sampler"):
        assert getattr(trainers[0].accelerator, name) == getattr(trainers[1].accelerator, name)
    for cls in (RoundPipeTrainer, Trainer):
        adopting = make_trainer(cls, MODELS["full"](), ROWS, **options(num_steps=3))
        assert adopting.args.gradient_accumulation_steps == 3
        with pytest.raises(ValueError, match="num_steps"):
            make_trainer(
                cls, MODELS["full"](), ROWS, gradient_accumulation_steps=2, **options(num_steps=3)
            )


@pytest.mark.slow
def test_saved_files_are_the_plain_trainers() -> None:
    """By name, the processing class and the model's config among them; ours adds none where masters
    are the weights."""
    from tokenizers import Tokenizer, models

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), pad_token="a"
    )
    pair = train_both(
        MODELS["full"],
        ROWS,
        processing_class=tokenizer,
        data_collator=None,
        max_steps=1,
        **EVERY_STEP,
    )
    names = [
        sorted(path.name for path in Path(folder, "checkpoint-1").iterdir())
        for folder in ("out-ours", "out-plain")
    ]
    assert names[0] == names[1]
    assert {
        "tokenizer.json",
        "config.json",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
    } <= set(names[0])
    states = [
        json.loads(Path(folder, "checkpoint-1", "trainer_state.json").read_text())
        for folder in ("out-ours", "out-plain")
    ]
    assert states[0].keys() == states[1].keys()
    moments = [
        torch.load(Path(folder, "checkpoint-1", "optimizer.pt"))
        for folder in ("out-ours", "out-plain")
    ]
    assert moments[0].keys() == moments[1].keys()
    assert pair.ours.state.total_flos == pair.plain.state.total_flos > 0
    assert pair.ours.get_num_trainable_parameters() == pair.plain.get_num_trainable_parameters()


@pytest.mark.slow
def test_reaching_into_the_optimizer() -> None:
    """Groups, rates and the group a weight is in, asked with the pipeline's copies."""
    pair = make_both(MODELS["full"], ROWS, weight_decay=0.1, learning_rate=0.3)
    with pytest.raises(ValueError, match="optimizer"):
        pair.ours.get_learning_rates()
    for trainer in pair:
        trainer.create_optimizer()
    assert pair.ours.get_learning_rates() == pair.plain.get_learning_rates() == [0.3, 0.3]
    (_, copy), *_ = pair.ours.optim_named_parameters()
    assert pair.ours.get_optimizer_group(copy)["weight_decay"] == 0.1
    groups = [[len(group) for group in trainer.get_optimizer_group()] for trainer in pair]
    assert groups[0] == groups[1]
    assert len(pair.ours.get_optimizer_group()) == 2
    assert pair.ours.accelerator.unwrap_model(pair.ours.model) is pair.ours.model


class Interrupted(TrainerCallback):
    """What the platform does that wants the job to end: SIGTERM, at the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), 15)


@pytest.mark.slow
def test_a_just_in_time_checkpoint_holds_the_update_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM saves at the next step boundary, though an update is in flight, and training
    stops."""
    from transformers import trainer_jit_checkpoint as module

    monkeypatch.setattr(module.CheckpointManager, "_sigterm_handler", _arm_at_once)
    for cls in (RoundPipeTrainer, Trainer):
        settings: dict[str, Any] = {
            "enable_jit_checkpoint": True,
            "async_optimizer": True,
            "max_steps": 4,
        }
        trainer = trained(cls, MODELS["full"](), ROWS, callbacks=[Interrupted()], **settings)
        assert trainer.state.global_step == 2
    ours, plain = (
        load_file(f"{folder}/checkpoint-1/model.safetensors")
        for folder in ("out-ours", "out-plain")
    )
    assert_same_weights(ours, plain)
    assert not list(Path("out-ours").glob("*/*incomplete*"))


def _arm_at_once(manager: Any, *_: Any) -> None:
    manager.is_checkpoint_requested = True


@pytest.mark.slow
def test_datasets_and_their_formats_give_the_same_run() -> None:
    columns = {
        name: torch.stack([row[name] for row in ROWS]).tolist() for name in ("input_ids", "labels")
    }
    dataset = Dataset.from_dict(columns | {"unused": [0] * len(ROWS)})
    runs = [
        trained(RoundPipeTrainer, MODELS["full"](), rows)
        for rows in (ROWS, dataset, dataset.with_format("torch"))
    ]
    for other in runs[1:]:
        assert_same_logs(logged(other), logged(runs[0]), atol=0.0)
        assert differ(weights(other), weights(runs[0])) == []
    seeded = trained(RoundPipeTrainer, MODELS["full"](), ROWS, seed=8, data_seed=9)
    assert differ(weights(seeded), weights(runs[0]))


class Regresses(nn.Module):
    """Takes what it is given and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-0.5))

    def forward(self, input_x: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        y = self.a * input_x + self.b
        return (
            {"output": y}
            if labels is None
            else {"loss": nn.functional.mse_loss(y, labels), "output": y}
        )


@pytest.mark.slow
def test_a_straight_line() -> None:
    """The model of most of those tests: two scalars, a mean over rows, no config; one layer on one
    device."""
    generator = torch.Generator().manual_seed(2)
    rows = [{"input_x": x, "labels": 2 * x + 1} for x in torch.randn(10, generator=generator)]
    settings: dict[str, Any] = {
        "eval_dataset": rows[:5],
        "eval_strategy": "epoch",
        "per_device_train_batch_size": 4,
    }
    assert_same(train_both(Regresses, rows, num_train_epochs=3, **settings))
    assert_same(
        train_both(
            Regresses, rows, gradient_accumulation_steps=2, eval_use_gather_object=True, **settings
        )
    )


class RunsOutAbove(TrainerCallback):
    """No batch of more than ``rows`` fits."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.train_batch_size > self.rows:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.slow
def test_a_batch_size_that_was_found_is_resumed_with() -> None:
    """It is in the checkpoint's state; what was asked for at first is not tried again."""
    settings: dict[str, Any] = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 4,
        **EVERY_STEP,
    }
    trainers = []
    for cls in (RoundPipeTrainer, Trainer):
        found = trained(
            cls, MODELS["full"](), ROWS, callbacks=[RunsOutAbove(3)], max_steps=4, **settings
        )
        assert found.state.train_batch_size < 4
        resumed = make_trainer(cls, MODELS["full"](), ROWS, max_steps=4, **settings)
        run(resumed, resume_from_checkpoint=f"{found.args.output_dir}/checkpoint-2")
        assert resumed.state.train_batch_size == found.state.train_batch_size
        trainers += [found, resumed]
    ours, ours_resumed, plain, plain_resumed = trainers
    assert_same_weights(weights(ours), weights(plain))
    assert_same_weights(weights(ours_resumed), weights(plain_resumed))
    assert differ(weights(ours_resumed), weights(ours)) == []


def word_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="a", bos_token="b", eos_token="c"
    )


@pytest.mark.slow
def test_special_tokens_and_the_collators_tokenizer() -> None:
    """Configs take the special tokens of the tokenizer when training begins; that of a collator is
    saved, too."""
    trainers = []
    for cls in (RoundPipeTrainer, Trainer):
        given = trained(cls, MODELS["full"](), ROWS, processing_class=word_tokenizer(), max_steps=1)
        config = given.model.config
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
        collates = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)
        trainers.append(
            trained(cls, MODELS["full"](), ROWS, data_collator=collates, max_steps=1, **EVERY_STEP)
        )
        assert Path(trainers[-1].args.output_dir, "checkpoint-1", "tokenizer.json").is_file()
    assert_same(Pair(*trainers))


@pytest.mark.slow
def test_resuming_in_the_middle_of_accumulation_with_frozen_layers() -> None:
    """Batches are counted in windows; frozen flags are the user's, and stay."""

    def half_frozen() -> nn.Module:
        model: Any = MODELS["full"]()
        model.model.layers[:2].requires_grad_(False)
        return model

    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        **EVERY_STEP,
    }
    pair = train_both(half_frozen, ROWS, **settings)
    resumed = make_trainer(
        RoundPipeTrainer, half_frozen(), ROWS, devices=3, output_dir="resumed", **settings
    )
    run(resumed, resume_from_checkpoint="out-ours/checkpoint-3")
    assert differ(weights(resumed), weights(pair.ours)) == []
    assert_same(pair)
    trains = [parameter.requires_grad for parameter in resumed.model.parameters()]
    assert trains == [parameter.requires_grad for parameter in half_frozen().parameters()]


@pytest.mark.slow
def test_keys_of_memory_metrics_and_of_predictions() -> None:
    """After training and predicting, too; `ignore_keys=[]` leaves nothing out."""
    pair = make_both(MODELS["full"], ROWS, skip_memory_metrics=False, max_steps=1)
    for how in (
        lambda trainer: trainer.train().metrics,
        lambda trainer: trainer.predict(ROWS[:3]).metrics,
    ):
        ours, plain = map(how, pair)
        assert ours.keys() == plain.keys()
        assert any("mem_cpu" in key for key in plain)
    arrays = [trainer.predict(ROWS[:3], ignore_keys=[]).predictions for trainer in pair]
    np.testing.assert_allclose(*arrays, atol=1e-5)


@pytest.mark.slow
def test_the_banner_follows_the_log_level() -> None:
    for level, is_shown in (("info", True), ("warning", False)):
        trainer = make_trainer(
            RoundPipeTrainer, MODELS["full"](), ROWS, max_steps=1, log_level=level
        )
        with CaptureLogger(transformers_logging.get_logger("transformers.trainer")) as captured:
            run(trainer)
        assert ("***** Running training *****" in captured.out) == is_shown
    transformers_logging.set_verbosity_warning()


@pytest.mark.slow
def test_an_accelerator_of_the_users_is_used() -> None:
    """`use_configured_state` wants one, and takes it."""
    for cls in (RoundPipeTrainer, Trainer):
        AcceleratorState._reset_state(True)
        with pytest.raises(ValueError, match="requires a pre-configured"):
            make_trainer(
                cls, MODELS["full"](), ROWS, accelerator_config={"use_configured_state": True}
            )
        Accelerator(cpu=True)
        trained(
            cls,
            MODELS["full"](),
            ROWS,
            max_steps=1,
            accelerator_config={"use_configured_state": True},
        )
        with pytest.raises(NotImplementedError, match="not.*instance|Tried passing in a callable"):
            make_trainer(cls, MODELS["full"](), ROWS, accelerator_config=AcceleratorConfig)


class LooksAtEmbeddings(TrainerCallback):
    """Notes how far from their weights embeddings are, after the hook that adds noise."""

    def __init__(self) -> None:
        self.distances: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self.hook = model.get_input_embeddings().register_forward_hook(self.look)

    def look(self, embeddings: nn.Module, args: Any, output: Tensor) -> None:
        self.distances.append(float((output - embeddings.weight[args[0]]).norm(dim=-1).mean()))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.hook.remove()


@pytest.mark.slow
def test_noise_on_embeddings() -> None:
    """Other noise for every microbatch, the same in its recompute and on any number of devices, as
    much as the plain Trainer's, and none in evaluation."""
    seen, runs = [], []
    settings: dict[str, Any] = {
        "neftune_noise_alpha": 5.0,
        "num_train_epochs": 4,
        "num_microbatch": 2,
    }
    for cls, devices in ((RoundPipeTrainer, 1), (RoundPipeTrainer, 3), (Trainer, None)):
        looks = LooksAtEmbeddings()
        runs.append(
            trained(cls, MODELS["full"](), ROWS, callbacks=[looks], devices=devices, **settings)
        )
        seen.append(looks.distances)
        assert len({runs[-1].evaluate(ROWS[:4])["eval_loss"] for _ in range(2)}) == 1
    assert logged(runs[0])[:-1] == logged(runs[1])[:-1]
    assert differ(weights(runs[0]), weights(runs[1])) == []
    assert [len(set(distances)) for distances in seen] == [32, 32, 16]
    means = [float(np.mean(distances)) for distances in seen]
    assert means == pytest.approx([means[2]] * 3, rel=0.03)
