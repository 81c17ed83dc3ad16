"""`trainer.model.generate` and `predict_with_generate` give what the plain trainers give, between
and after updates: where the weights are, and by a copy on a device."""

import copy
import gc
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    EvalPrediction,
    GenerationConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

from roundpipe.engine import generation
from roundpipe.threads.worker import in_worker
from roundpipe_hf import (
    RoundPipeSeq2SeqTrainer,
    RoundPipeSeq2SeqTrainingArguments,
    RoundPipeTrainer,
)
from tests.support.branching import make_t5, t5_batch
from tests.support.encoder_decoder_models import make as make_pair
from tests.support.encoder_decoder_models import rows_of
from tests.support.models import make_llama, make_lora_llama
from tests.support.trainers import (
    Pair,
    assert_same,
    assert_same_logs,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
)

ROWS = token_rows(7)
PROMPTS = torch.stack([row["input_ids"][:5] for row in ROWS[:3]])
ASKED: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(params=["copied", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A virtual device computes where the weights are; a copy there does what one on a GPU does."""
    if request.param == "copied":
        monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    return str(request.param)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each generation by a copy, which are made on virtual devices as well: whether it was
    made on a worker."""
    made: list[bool] = []
    inner = generation.generated

    def generated(*args: Any, **kwargs: Any) -> Any:
        made.append(in_worker())
        return inner(*args, **kwargs)

    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    monkeypatch.setattr(generation, "generated", generated)
    return made


def tied() -> Any:
    return make_llama(tied=True)


class Generates(TrainerCallback):  # type: ignore[misc]  # untyped base
    """Asks the model after every step, as callbacks that log samples do."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.made.append(model.generate(PROMPTS, **ASKED))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("make", [tied, make_lora_llama])
def test_after_every_step(make: Callable[[], Any], devices: int, way: str) -> None:
    """And the training is the same as if nobody had asked."""
    seen, settings = (
        Pair(Generates(), Generates()),
        {"devices": devices, "max_steps": 4, "learning_rate": 0.5},
    )
    pair = make_both(make, ROWS, **settings)
    for trainer, callback in zip(pair, seen, strict=True):
        trainer.add_callback(callback)
        run(trainer)
        callback.made.append(trainer.model.generate(PROMPTS, **ASKED))
    assert_same(pair)
    assert len(seen.ours.made) == 5
    assert all(torch.equal(a, b) for a, b in zip(*(one.made for one in seen), strict=True))
    assert len({str(one) for one in seen.plain.made}) > 1, "no step changed a token"


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_an_asynchronous_step_is_waited_for(devices: int, copied: list[bool]) -> None:
    """What is generated is of the weights that `trainer.model` then has."""
    seen: list[tuple[Tensor, Any]] = []

    class Looks(TrainerCallback):  # type: ignore[misc]  # untyped base
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            seen.append((model.generate(PROMPTS, **ASKED), copy.deepcopy(model)))

    settings: dict[str, Any] = {"devices": devices, "max_steps": 3, "callbacks": [Looks()]}
    run(
        make_trainer(
            RoundPipeTrainer, make_llama(tied=False), ROWS, async_optimizer=True, **settings
        )
    )
    assert len(copied) == 3
    for tokens, model in seen:
        assert torch.equal(tokens, model.generate(PROMPTS, **ASKED))
    assert len(copied) == 3  # a copy of the model is a model of its own


def test_the_model_stays_an_ordinary_one(copied: list[bool]) -> None:
    """Its files, its signature, its copies; it outlives its trainer, and its trainer's engine."""
    model = make_llama(tied=False)
    plain, names = inspect.signature(model.generate), list(model.state_dict())
    trainer = run(make_trainer(RoundPipeTrainer, model, ROWS, max_steps=1))
    expected = model.generate(PROMPTS, **ASKED)
    assert len(copied) == 1
    assert inspect.signature(model.generate) == plain
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(PROMPTS, **ASKED), expected)
    trainer._engine(trains=False).close()
    assert torch.equal(model.generate(PROMPTS, **ASKED), expected)
    del trainer
    gc.collect()
    assert torch.equal(model.generate(PROMPTS, **ASKED), expected)
    assert len(copied) == 1


def test_a_model_that_was_changed_after_training(copied: list[bool]) -> None:
    """Adapters merged for good, say: the engine is of another model."""
    trainer = run(make_trainer(RoundPipeTrainer, make_lora_llama(), ROWS, max_steps=1))
    expected = trainer.model.generate(input_ids=PROMPTS, **ASKED)
    merged = trainer.model.merge_and_unload()
    assert torch.equal(merged.generate(PROMPTS, **ASKED), expected)
    assert len(copied) == 1


def test_another_model_of_the_same_trainer(copied: list[bool]) -> None:
    """Each generates by itself."""
    trainer = run(make_trainer(RoundPipeTrainer, make_llama(tied=False), ROWS, max_steps=1))
    first, second = trainer.model, make_llama(tied=True)
    expected = [copy.deepcopy(one).generate(PROMPTS, **ASKED) for one in (first, second)]
    trainer.model = second
    run(trainer)
    assert torch.equal(first.generate(PROMPTS, **ASKED), expected[0])
    assert torch.equal(
        second.generate(PROMPTS, **ASKED), copy.deepcopy(second).generate(PROMPTS, **ASKED)
    )
    assert len(copied) == 1


def test_a_training_step_that_generates(way: str) -> None:
    """As distillation from a student's own samples does."""

    class OnPolicy:
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            made = self.model.generate(inputs["input_ids"][:, :6], min_length=12, max_length=12)  # type: ignore[attr-defined]
            inputs = {"input_ids": made, "labels": made.clone()}
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    assert_same(Pair(*map(run, make_both(tied, ROWS, OnPolicy))))


def test_a_loss_that_generates_on_a_worker(copied: list[bool]) -> None:
    """Nobody may wait there for the engine, so the host's weights generate."""
    places: list[bool] = []

    class Samples:
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **kwargs: Any) -> Any:
            places.append(in_worker())
            made = self.model.generate(inputs["input_ids"][:, :6], **ASKED)  # type: ignore[attr-defined]
            loss = nn.functional.cross_entropy(
                model(input_ids=inputs["input_ids"]).logits[:, 0], made[:, 6], reduction="sum"
            )
            return loss

    settings: dict[str, Any] = {"loss_reduction": "sum", "devices": 2, "max_steps": 2}
    assert_same(Pair(*map(run, make_both(tied, ROWS, Samples, **settings))))
    assert any(places)
    assert not any(copied)


def test_a_generate_that_is_not_transformers(way: str) -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor]:
            return ((super().forward(x) - labels).square().mean(),)

        def generate(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight)

    rows = [{"x": torch.ones(3), "labels": torch.ones(2)} for _ in range(4)]
    settings: dict[str, Any] = {"devices": 1, "max_steps": 1, "remove_unused_columns": False}
    trainer = run(make_trainer(RoundPipeTrainer, Own(3, 2), rows, **settings))
    made = trainer.model.generate(torch.ones(3))
    assert torch.equal(made, nn.functional.linear(torch.ones(3), trainer.model.weight))


# --- predict_with_generate ---


def t5_rows() -> list[dict[str, Tensor]]:
    batch = t5_batch(7).kwargs
    return [{name: value[row] for name, value in batch.items()} for row in range(7)]


def decoder() -> Any:
    model: Any = make_llama(tied=True)
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    return model


def adapted() -> Any:
    model: Any = make_lora_llama()
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    return model


def of_t5() -> Any:
    model: Any = make_t5()
    model.generation_config.decoder_start_token_id = 0
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 1
    return model


def counts(found: EvalPrediction) -> dict[str, float]:
    """Of tokens and labels, so that a metric says if either differs."""
    return {"tokens": float(found.predictions.sum()), "labels": float(found.label_ids.sum())}


def seq2seq(is_ours: bool, make: Callable[[], Any], rows: Any, **settings: Any) -> Any:
    trainer, arguments = (
        (RoundPipeSeq2SeqTrainer, RoundPipeSeq2SeqTrainingArguments)
        if is_ours
        else (Seq2SeqTrainer, Seq2SeqTrainingArguments)
    )
    given = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "use_cpu": True,
        "report_to": [],
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_steps": 3,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "predict_with_generate": True,
    } | settings
    if not is_ours:
        given.pop("devices")
    return trainer(
        make(),
        arguments(**given),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=counts,
    )


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "t5": (of_t5, t5_rows),
    "bart": (lambda: make_pair("bart"), lambda: rows_of("bart", 7)),
    "whisper": (lambda: make_pair("whisper"), lambda: rows_of("whisper", 7)),
    "decoder": (decoder, lambda: [{k: v[:8] for k, v in row.items()} for row in ROWS]),
    "lora": (adapted, lambda: [{k: v[:8] for k, v in row.items()} for row in ROWS]),
}


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", KINDS)
def test_predict_with_generate(kind: str, devices: int, way: str) -> None:
    """Metrics while training, evaluation afterwards with settings of its own, and predictions."""
    make, rows = KINDS[kind]
    settings: dict[str, Any] = {"generation_max_length": 14, "devices": devices}
    pair = Pair(*(seq2seq(is_ours, make, rows(), **settings) for is_ours in (True, False)))
    assert_same(Pair(*map(run, pair)))
    evaluated = [one.evaluate(max_new_tokens=4, num_beams=2) for one in pair]
    assert "eval_tokens" in evaluated[0]
    assert_same_logs(logged(pair.ours)[-1:], logged(pair.plain)[-1:])
    predicted = [one.predict(rows()[:4]) for one in pair]
    assert predicted[0].predictions.tolist() == predicted[1].predictions.tolist()
    assert predicted[0].label_ids.tolist() == predicted[1].label_ids.tolist()
    assert predicted[0].metrics["test_loss"] == pytest.approx(
        predicted[1].metrics["test_loss"], abs=1e-5
    )
    pair.ours._engine(trains=False).close()


def test_a_configuration_of_the_arguments(way: str) -> None:
    """Its beams and lengths, and the plain error where it cannot be right."""
    make, rows = KINDS["t5"]
    config = GenerationConfig(
        max_length=9, num_beams=2, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
    )
    pair = [
        seq2seq(is_ours, make, rows(), generation_config=config, devices=1)
        for is_ours in (True, False)
    ]
    ours, plain = [one.predict(rows()).predictions.tolist() for one in pair]
    assert ours == plain
    pair[0]._engine(trains=False).close()
    bad = GenerationConfig(do_sample=False, temperature=0.9)
    messages = []
    for is_ours in (True, False):
        with pytest.raises(ValueError, match="Fix these issues") as caught:
            seq2seq(is_ours, make, rows(), generation_config=bad, devices=1)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_in_the_precision_of_the_arguments(way: str) -> None:
    """Trainer's model computes in bf16 where it generates, too."""
    make, rows = KINDS["decoder"]
    settings: dict[str, Any] = {"bf16": True, "devices": 1, "generation_max_length": 14}
    pair = Pair(*(seq2seq(is_ours, make, rows(), **settings) for is_ours in (True, False)))
    found = [one.predict(rows()) for one in pair]
    assert found[0].predictions.tolist() == found[1].predictions.tolist()
    seen = []

    def dtype(_: Any, __: Any, output: Tensor) -> None:
        seen.append(output.dtype)

    pair.ours.model.model.layers[0].mlp.down_proj.register_forward_hook(dtype)
    pair.ours.model.generate(PROMPTS, **ASKED)
    assert set(seen) == {torch.bfloat16}
    pair.ours._engine(trains=False).close()


def test_the_loss_alone_generates_nothing(copied: list[bool]) -> None:
    make, rows = KINDS["t5"]
    pair = Pair(
        *(
            seq2seq(is_ours, make, rows(), devices=1, prediction_loss_only=True)
            for is_ours in (True, False)
        )
    )
    losses = [one.evaluate()["eval_loss"] for one in pair]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert not copied
    pair.ours._engine(trains=False).close()
