"""Engines come and go with the model; running things twice, or in another order, works as with the
plain Trainer."""

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from roundpipe.engine.state import Host
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ClosedError, ConfigError
from roundpipe.threads.interpreter import QuietInterpreter
from roundpipe_hf import RoundPipeTrainer
from tests.support.models import make_llama
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


def rates(trainer: Any) -> list[float]:
    return [
        entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry
    ]


def test_training_twice_restarts_the_schedule_and_keeps_the_engine() -> None:
    """Each run logs the same four rates; the second goes on from the first's weights."""
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
    """Model collected, threads joined or gone, no hooks of ours, the same losses each time."""
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
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def test_a_dropped_trainer_needs_no_close() -> None:
    trainer = trained(RoundPipeTrainer, MODELS["full"](), ROWS[:3])
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines keep the interpreter quiet, as with accelerators. They thaw what the suite has
    frozen, so it is frozen again: each of the later tests took a third of a second longer for every
    Trainer."""
    make = Host.__init__

    def made(self: Host, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._interpreter = QuietInterpreter()

    monkeypatch.setattr(Host, "__init__", made)
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("use", ["train", "evaluate"])
def test_nor_does_one_whose_training_had_settled(use: str) -> None:
    """What is alive by then was kept from the collector until the engine is closed, which a dropped
    one never was."""
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, eval_dataset=ROWS, per_device_eval_batch_size=2
    )
    frozen = 0

    class Frozen(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            nonlocal frozen
            frozen = max(frozen, gc.get_freeze_count())

        on_prediction_step = on_step_end

    trainer.add_callback(Frozen)
    getattr(trainer, use)()
    assert frozen
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
    with pytest.raises(ClosedError):
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


def test_a_closed_engine_is_built_again() -> None:
    """`trainer.model_wrapped.close()` gives memory back; what comes after works, and goes on from
    the same weights."""
    pair = train_both(MODELS["full"], ROWS)
    first = pair.ours.model_wrapped
    first.close()
    assert pair.ours.evaluate(ROWS[:3])["eval_loss"] == pytest.approx(
        pair.plain.evaluate(ROWS[:3])["eval_loss"]
    )
    pair.ours.save_model("saved")
    for trainer in pair:
        run(trainer)
    assert_same_logs(logged(pair.ours), logged(pair.plain))
    assert pair.ours.model_wrapped is not first


def merge_adapters(trainer: Any) -> None:
    trainer.model = trainer.model.merge_and_unload()


def replace_a_parameter(trainer: Any) -> None:
    head = trainer.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach() * 0.1)


def replace_a_module(trainer: Any) -> None:
    """It has no parameters, but is another function."""
    trainer.model.get_base_model().model.layers[1].mlp.act_fn = nn.Tanh()


@pytest.fixture
def changed(request: pytest.FixtureRequest) -> Pair:
    """Trainers whose models are others since their run: the engine refused whatever waits for its
    updates first."""
    pair = train_both(MODELS["lora"], ROWS, eval_dataset=ROWS[:3])
    for trainer in pair:
        request.param(trainer)
    return pair


@pytest.mark.parametrize(
    "changed", [merge_adapters, replace_a_parameter, replace_a_module], indirect=True
)
def test_a_changed_model_is_evaluated(changed: Pair) -> None:
    ours, plain = (trainer.evaluate()["eval_loss"] for trainer in changed)
    assert ours == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        merge_adapters,
        pytest.param(replace_a_parameter, marks=pytest.mark.slow),
        pytest.param(replace_a_module, marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_a_changed_model_is_saved(changed: Pair) -> None:
    for trainer in changed:
        trainer.save_model()
    ours, plain = (
        sorted(path.name for path in Path(trainer.args.output_dir).iterdir()) for trainer in changed
    )
    assert ours == plain
    changed.ours.synchronize()
    assert_same_weights(weights(changed.ours), weights(changed.plain))


def test_unfreezing_between_runs_trains_what_was_frozen() -> None:
    model = MODELS["full"]()
    model.lm_head.requires_grad_(False)
    trainer = trained(RoundPipeTrainer, model, ROWS)
    before = weights(trainer)
    model.lm_head.requires_grad_(True)
    run(trainer)
    assert "lm_head.weight" in differ(weights(trainer), before)


def test_a_replaced_module_trains() -> None:
    pair = train_both(MODELS["lora"], ROWS)
    for trainer in pair:
        replace_a_module(trainer)
        run(trainer)
    assert_same(pair)


class Freezes(TrainerCallback):
    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        model.lm_head.requires_grad_(False)


class Replaces(TrainerCallback):
    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        model.model.layers[0].mlp.act_fn = nn.Tanh()


class Resizes(TrainerCallback):
    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.resize_token_embeddings(72)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        (Freezes, "parameter 'lm_head.weight' was frozen"),
        (Replaces, "modules"),
        (Resizes, "parameter 'model.embed_tokens.weight' had the shape .64, .*and has .72"),
    ],
)
def test_changes_of_the_model_during_a_run_are_told(changes: type, first: str) -> None:
    """And the first of them by its name."""
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, callbacks=[changes()])
    with pytest.raises(ConfigError, match=f"frozen or unfrozen during train.*change: .*{first}"):
        run(trainer)
    trainer.remove_callback(changes)
    run(trainer)
    assert trainer.state.global_step == 4


def test_an_engine_is_taken_as_the_model() -> None:
    """The trainer sees the model inside, and leaves the engine to its owner."""
    model = MODELS["full"]()
    with wrap_model_to_roundpipe(model, optim_dtype=torch.float32, devices=2) as engine:
        trainer = trained(RoundPipeTrainer, engine, ROWS)
        assert trainer.model is model
        assert trainer.model_wrapped is engine
        plain = trained(Trainer, MODELS["full"](), ROWS)
        assert_same_logs(logged(trainer), logged(plain))


def test_settings_of_an_engine_that_was_given_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with wrap_model_to_roundpipe(MODELS["full"](), devices=1) as engine:
        make_trainer(RoundPipeTrainer, engine, ROWS, devices=2, async_optimizer=True)
    assert "devices: no effect" in caplog.text


def test_plain_training_arguments_do() -> None:
    args = TrainingArguments(
        "out",
        report_to=[],
        use_cpu=True,
        optim="sgd",
        learning_rate=0.1,
        max_steps=2,
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = RoundPipeTrainer(MODELS["full"](), args, train_dataset=ROWS)
    trainer.train()
    assert len(trainer.model_wrapped.devices) == 1
    assert trainer.state.global_step == 2
    trainer.model_wrapped.close()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_gradient_checkpointing_is_left_to_the_engine(kind: str) -> None:
    """The flag is honoured by recompute; blocks are not checkpointed a second time, in any run, and
    args stay."""
    pair = train_both(MODELS[kind], ROWS, gradient_checkpointing=True)
    assert_same_logs(logged(pair.ours), logged(pair.plain))
    run(pair.ours)
    assert not pair.ours.model.is_gradient_checkpointing
    assert count_hooks(pair.ours.model) == 0
    assert pair.ours.args.gradient_checkpointing


def test_arguments_are_left_untouched() -> None:
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, devices=2, gradient_accumulation_steps=2
    )
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
            self.optimizer = torch.optim.SGD(
                [parameter for _, parameter in named], lr=0.05, momentum=0.9
            )
        return self.optimizer


def test_an_optimizer_over_the_pipelines_weights_is_adopted() -> None:
    pair = train_both(MODELS["full"], ROWS, OwnOptimizer)
    assert_same_logs(logged(pair.ours), logged(pair.plain))


class OwnStep:
    """A training step of the user's own, that goes through forward and backward."""

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_step_that_calls_backward_itself(kind: str) -> None:
    pair = train_both(MODELS[kind], ROWS, OwnStep, gradient_accumulation_steps=2)
    assert_same_logs(logged(pair.ours), logged(pair.plain))


def test_a_step_of_its_own_returns_its_loss_where_trainer_adds_losses_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a GPU that is where Trainer takes the model to be, and the loss was in host memory."""
    trainer = type("Mixed", (OwnStep, RoundPipeTrainer), {})
    made = make_trainer(trainer, MODELS["full"](), ROWS)
    run(made)
    monkeypatch.setattr(type(made.args), "device", torch.device("meta"))
    inputs = made.data_collator(ROWS[:3])
    assert made.training_step(made.model_wrapped, inputs).device.type == "meta"


def test_noisy_embeddings() -> None:
    """NEFTune's hook runs, in training only, and is gone afterwards."""
    rows = ROWS[:6]
    quiet, noisy = (
        trained(RoundPipeTrainer, MODELS["full"](), rows, neftune_noise_alpha=a)
        for a in (None, 5.0)
    )
    assert [entry["loss"] for entry in logged(quiet)[:1]] != [
        entry["loss"] for entry in logged(noisy)[:1]
    ]
    assert count_hooks(noisy.model) == 0
    again = trained(RoundPipeTrainer, MODELS["full"](), rows, neftune_noise_alpha=5.0)
    assert logged(again) == logged(noisy)


def test_optimizer_class_and_arguments() -> None:
    pair = train_both(
        MODELS["full"],
        ROWS,
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
        weight_decay=0.1,
    )
    assert_same_logs(logged(pair.ours), logged(pair.plain))


def test_optimizer_and_scheduler_made_by_hand_before_training() -> None:
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS)
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    made = trainer.optimizer
    run(trainer)
    assert trainer.optimizer.optimizer is made
    assert rates(trainer) == pytest.approx([0.1, 0.075, 0.05, 0.025])


def own_bytes() -> int:
    """Memory that is this process's own: the allocator's, and buffers that could be page-locked."""
    for _ in range(2):
        gc.collect()
    fields = dict(
        line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024


class Measures(TrainerCallback):
    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (10, 40):
            self.bytes[state.global_step] = own_bytes()


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"
)
def test_memory_does_not_grow_with_steps() -> None:
    """Batches of another length at every step, evaluated every 10 and saved every 20 steps."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    rows = [
        {name: column.repeat(1 + index * 7 % 5) for name, column in row.items()}
        for index, row in enumerate(ROWS)
    ]
    measures = Measures()
    trainer = trained(
        RoundPipeTrainer,
        LlamaForCausalLM(config),
        [rows[index % 12] for index in range(41)],
        callbacks=[measures],
        per_device_train_batch_size=1,
        eval_dataset=rows[:1],
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=20,
        save_only_model=True,
        save_total_limit=1,
        devices=2,
    )
    weight_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert measures.bytes[40] - measures.bytes[10] < 0.05 * weight_bytes + 20 * 2**20
