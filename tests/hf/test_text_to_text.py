"""Encoders with a decoder train and evaluate by their presets as the plain Trainer does it, whose
losses are means over a batch's labels whatever the number of accumulated batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from roundpipe import RoundPipe
from tests.support.branching import make_t5, t5_batch
from tests.support.encoder_decoder_models import LAYERS, make, rows_of
from tests.support.trainers import assert_same, train_both


def rows() -> list[dict[str, Any]]:
    """They are as `DataCollatorForSeq2Seq` makes them, which gives the decoder its inputs."""
    model: Any = make_t5()
    columns: dict[str, Any] = t5_batch(rows=6).kwargs
    columns["decoder_input_ids"] = model._shift_right(columns["labels"])
    return [{name: value[row] for name, value in columns.items()} for row in range(6)]


def adapted() -> Any:
    config = LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False)
    return get_peft_model(make_t5(), config)


def begun(name: str) -> list[dict[str, Any]]:
    """With what the decoder starts from, because a smoothed loss keeps labels from the model."""
    made = rows_of(name)
    for row in made:
        shifted = row["labels"].roll(1).masked_fill(row["labels"].roll(1) == -100, 1)
        row["decoder_input_ids"] = shifted.index_fill(0, torch.tensor(0), 2)
    return made


def of_whisper() -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(make("whisper"), config)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "t5": (make_t5, rows, 7),
    "t5-lora": (adapted, rows, 7),
    "bart": (lambda: make("bart"), partial(begun, "bart"), LAYERS),
    "whisper": (lambda: make("whisper"), partial(begun, "whisper"), LAYERS),
    "whisper-lora": (of_whisper, partial(begun, "whisper"), LAYERS),
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many microbatches each round was made whose loss ran fused."""
    counts: list[int] = []
    inner = RoundPipe.forward_backward

    def counted(self: RoundPipe, *args: Any, microbatches: Any, **kwargs: Any) -> Any:
        counts.append(len(microbatches))
        return inner(self, *args, microbatches=microbatches, **kwargs)

    monkeypatch.setattr(RoundPipe, "forward_backward", counted)
    return counts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1}], ids=["mean", "smooth"])
def test_training(name: str, settings: dict[str, Any], fused: list[int]) -> None:
    """Accumulation over two uneven batches, clipping, three devices; all of it fused."""
    make_model, data, layers = MODELS[name]
    pair = train_both(
        make_model,
        data(),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        eval_dataset=data()[:5],
        eval_strategy="epoch",
        per_device_eval_batch_size=2,
        **settings,
    )
    engine = pair.ours._engine()
    assert isinstance(engine, RoundPipe)
    assert engine.statistics()["layers"] == layers
    assert_same(pair)
    assert max(fused) > 1


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_rows_without_a_label(name: str) -> None:
    """The mean is over those of the others."""
    make_model, data, _ = MODELS[name]
    rows = data()
    for row in (1, 4):
        rows[row]["labels"] = torch.full_like(rows[row]["labels"], -100)
    assert_same(train_both(make_model, rows, per_device_train_batch_size=3))
