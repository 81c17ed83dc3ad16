"""Engines come and go with the model; running things twice, or in another order, works as with the plain Trainer."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from hf.trainers import (
    MODELS,
    assert_same_logs,
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
from models import make_llama
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from roundpipe.wrap import wrap_model_to_roundpipe
from roundpipe_hf import RoundPipeTrainer

ROWS = token_rows(12)


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def test_training_twice_restarts_the_schedule_and_keeps_the_engine() -> None:
    """BC-29: each run logs the same four rates; the second goes on from the first's weights."""
    pair = make_both(MODELS["full"], ROWS)
    engines = []
    for _ in range(2):
        for trainer in pair:
            run(trainer)
            assert rates(trainer) == pytest.approx([0.1, 0.075, 0.05, 0.025])
        assert_same_logs(logged(pair.ours), logged(pair.plain))
        engines.append(pair.ours.model_wrapped)
    assert engines[0] is engines[1]


def test_a_new_trainer_on_the_same_model_goes_on() -> None:
    models = [MODELS["full"](), MODELS["full"]()]
    for _ in range(2):
        ours = trained(RoundPipeTrainer, models[0], ROWS, devices=2)
        plain = trained(Trainer, models[1], ROWS)
        assert_same_logs(logged(ours), logged(plain))


def test_nothing_is_left_of_a_trainer_that_is_gone() -> None:
    """BC-29: model collected, threads joined or gone, no hooks of ours, the same losses each time."""
    threads = threading.active_count()
    losses, models = [], []
    for _ in range(3):
        model = MODELS["lora"]()
        hooks = count_hooks(model)
        trainer = trained(RoundPipeTrainer, model, ROWS, devices=2)
        losses.append([entry["loss"] for entry in logged(trainer)[:-1]])
        assert count_hooks(model) == hooks
        models.append(weakref.ref(model))
        trainer.model_wrapped.close()
        del trainer, model
        gc.collect()
    assert [model() for model in models] == [None] * 3
    assert losses[0] == losses[1] == losses[2]
    assert threading.active_count() == threads


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def test_a_dropped_trainer_needs_no_close() -> None:
    trainer = trained(RoundPipeTrainer, MODELS["full"](), ROWS[:3])
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None


def test_model_init_makes_a_new_engine_for_each_run() -> None:
    trainer = make_trainer(RoundPipeTrainer, None, ROWS, model_init=MODELS["full"])  # type: ignore[arg-type]
    run(trainer)
    first, losses = trainer.model_wrapped, logged(trainer)
    run(trainer)
    assert trainer.model_wrapped is not first
    assert trainer.model_wrapped.model is trainer.model
    assert logged(trainer) == losses
    with pytest.raises(Exception, match="close"):
        first.synchronize()


def test_a_changed_model_gets_a_new_engine() -> None:
    """Resized embeddings are other parameters; the optimizer follows too."""
    trainer = trained(RoundPipeTrainer, make_llama(tied=True), ROWS)
    first = trainer.model_wrapped
    trainer.model.resize_token_embeddings(70, mean_resizing=False)
    before = weights(trainer)
    run(trainer)
    assert trainer.model_wrapped is not first
    assert len(differ(weights(trainer), before)) == len(before)


def test_unfreezing_between_runs_trains_what_was_frozen() -> None:
    model = MODELS["full"]()
    model.lm_head.requires_grad_(False)
    trainer = trained(RoundPipeTrainer, model, ROWS)
    before = weights(trainer)
    model.lm_head.requires_grad_(True)
    run(trainer)
    assert "lm_head.weight" in differ(weights(trainer), before)


def test_an_engine_is_taken_as_the_model() -> None:
    """The trainer sees the model inside, and leaves the engine to its owner."""
    model = MODELS["full"]()
    with wrap_model_to_roundpipe(model, optim_dtype=torch.float32, devices=2) as engine:
        trainer = trained(RoundPipeTrainer, engine, ROWS)
        assert trainer.model is model
        assert trainer.model_wrapped is engine
        plain = trained(Trainer, MODELS["full"](), ROWS)
        assert_same_logs(logged(trainer), logged(plain))


def test_plain_training_arguments_do() -> None:
    args = TrainingArguments(
        "out", report_to=[], use_cpu=True, optim="sgd", learning_rate=0.1, max_steps=2, disable_tqdm=True, logging_steps=1
    )
    trainer = RoundPipeTrainer(MODELS["full"](), args, train_dataset=ROWS)
    trainer.train()
    assert len(trainer.model_wrapped.devices) == 1
    assert trainer.state.global_step == 2
    trainer.model_wrapped.close()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_gradient_checkpointing_is_left_to_the_engine(kind: str) -> None:
    """The flag is honoured by recompute; blocks are not checkpointed a second time, in any run, and args stay."""
    pair = train_both(MODELS[kind], ROWS, gradient_checkpointing=True)
    assert_same_logs(logged(pair.ours), logged(pair.plain))
    run(pair.ours)
    assert not pair.ours.model.is_gradient_checkpointing
    assert pair.ours.args.gradient_checkpointing


def test_arguments_are_left_untouched() -> None:
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, devices=2, gradient_accumulation_steps=2)
    before = trainer.args.to_dict()
    run(trainer)
    assert trainer.args.to_dict() == before


class Recorder(TrainerCallback):
    """Writes down every event, and what its handler was given."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.given: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args: Any, state: Any, control: Any, **given: Any) -> None:
            self.events.append(f"{name}@{state.global_step}")
            self.given = given

        return record


def test_callbacks_come_in_the_same_order() -> None:
    recorders = [Recorder(), Recorder()]
    for cls, recorder in zip((RoundPipeTrainer, Trainer), recorders, strict=True):
        trained(
            cls,
            MODELS["full"](),
            ROWS,
            callbacks=[recorder],
            gradient_accumulation_steps=2,
            eval_dataset=ROWS[:2],
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=2,
        )
    assert recorders[0].events == recorders[1].events
    assert recorders[0].given["model"].__class__ is recorders[1].given["model"].__class__


def test_we_add_no_callbacks() -> None:
    pair = make_both(MODELS["full"], ROWS)
    assert pair.ours.callback_handler.callback_list == pair.plain.callback_handler.callback_list


class OwnOptimizer:
    """A subclass that makes its optimizer by itself, the way the refusal recommends."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            named = getattr(self, "optim_named_parameters", self.model.named_parameters)()
            self.optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.05, momentum=0.9)
        return self.optimizer


def test_an_optimizer_over_the_pipelines_weights_is_adopted() -> None:
    pair = train_both(MODELS["full"], ROWS, OwnOptimizer)
    assert_same_logs(logged(pair.ours), logged(pair.plain))


def test_optimizer_class_and_arguments() -> None:
    pair = train_both(
        MODELS["full"], ROWS, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), weight_decay=0.1
    )
    assert_same_logs(logged(pair.ours), logged(pair.plain))


def test_optimizer_and_scheduler_made_by_hand_before_training() -> None:
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS)
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    made = trainer.optimizer
    run(trainer)
    assert trainer.optimizer.optimizer is made
    assert rates(trainer) == pytest.approx([0.1, 0.075, 0.05, 0.025])
