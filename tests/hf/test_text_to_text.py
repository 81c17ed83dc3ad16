"""T5 by its preset trains and evaluates as the plain Trainer does it, whose losses are means over a
batch's labels whatever the number of accumulated batches."""

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from roundpipe import RoundPipe
from tests.support.branching import make_t5, t5_batch
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


@pytest.mark.parametrize("make", [make_t5, adapted])
@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1}], ids=["mean", "smooth"])
def test_training(make: Any, settings: dict[str, Any]) -> None:
    """Accumulation over two uneven batches, clipping, three devices."""
    pair = train_both(
        make,
        rows(),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        eval_dataset=rows()[:5],
        eval_strategy="epoch",
        per_device_eval_batch_size=2,
        **settings,
    )
    engine = pair.ours._engine()
    assert isinstance(engine, RoundPipe)
    assert engine.statistics()["layers"] == 7
    assert_same(pair)
