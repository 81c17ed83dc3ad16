"""Models that see train and evaluate by their presets as in the plain Trainer: batches with images
in some rows, in none, and of different numbers and sizes."""

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from roundpipe import AutoRoundPipe
from tests.support.trainers import assert_same, train_both
from tests.support.vision_models import collated, make_seeing, seen_rows

# Batches of two rows, windows of two batches: a window has batches with images and without.
NUM_IMAGES = (1, 0, 0, 0, 2, 1, 0, 1, 0, 0)


def make(name: str, *, lora: bool) -> nn.Module:
    """Adapters sit in the tower and in the language model; B starts random."""
    model = make_seeing(name)
    if not lora:
        return model
    targets = ["qkv", "q_proj", "v_proj"] if "qwen" in name else ["q_proj", "v_proj"]
    return get_peft_model(
        model, LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2.5-vl", "qwen3-vl"])
def test_training_and_evaluation(name: str, lora: bool) -> None:
    rows = seen_rows(make_seeing(name), NUM_IMAGES)
    pair = train_both(
        lambda: make(name, lora=lora),
        rows,
        data_collator=collated,
        eval_dataset=rows[:5],
        eval_strategy="epoch",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        weight_decay=0.1,
    )
    engine: Any = pair.ours._engine()
    assert not isinstance(engine, AutoRoundPipe)
    assert_same(pair)
