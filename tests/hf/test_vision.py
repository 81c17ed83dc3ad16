"""Models that see train and evaluate by their presets as in the plain Trainer: batches with images
in some rows, in none, and of different numbers and sizes."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from roundpipe import AutoRoundPipe
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from tests.support.mixtures import STACKS
from tests.support.preset_models import VOCABULARY
from tests.support.trainers import assert_same, make_trainer, train_both
from tests.support.vision_models import collated, filmed_rows, make_seeing, seen_rows

# Batches of two rows, windows of two batches: a window has batches with images and without.
NUM_IMAGES = (1, 0, 0, 0, 2, 1, 0, 1, 0, 0)


def make(name: str, *, lora: bool) -> nn.Module:
    """Adapters sit in the tower, in the language model and in its experts; B starts random."""
    model = make_seeing(name)
    if not lora:
        return model
    targets = ["qkv", "q_proj", "v_proj"] if "qwen" in name else ["q_proj", "v_proj"]
    settings: dict[str, Any] = {"r": 2, "lora_alpha": 2, "init_lora_weights": False}
    stacks = {"target_parameters": STACKS} if "moe" in name else {}
    return get_peft_model(model, LoraConfig(target_modules=targets, **stacks, **settings))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("devices", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "name",
    [
        *("llava", "gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5-moe"),
        *(pytest.param(name, marks=SLOW) for name in ("llava-two-depths", "qwen3.5")),
    ],
)
def test_training_and_evaluation(name: str, lora: bool, devices: int) -> None:
    rows = seen_rows(make_seeing(name), NUM_IMAGES)
    pair = train_both(
        lambda: make(name, lora=lora),
        rows,
        devices=devices,
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


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["qwen3-vl-moe", "qwen3.5-moe"])
def test_batches_that_ask_for_the_routers_loss(name: str, lora: bool) -> None:
    """Of models that see only the call decides, never the config. Some batches ask, some do not."""
    asked: set[bool] = set()

    def build() -> nn.Module:
        model: Any = make(name, lora=lora)
        model.config.get_text_config().router_aux_loss_coef = 0.5
        return model

    def asking(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collated(rows)
        asks = bool(batch["input_ids"].sum() % 2)
        asked.add(asks)
        return batch | {"output_router_logits": asks}

    rows = seen_rows(make_seeing(name), NUM_IMAGES)
    pair = train_both(
        build,
        rows,
        data_collator=asking,
        eval_dataset=rows[:5],
        eval_strategy="epoch",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        num_microbatch=2,
    )
    assert len(asked) == 2
    assert_same(pair)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "name", ["qwen3-vl", *(pytest.param(name, marks=SLOW) for name in ("qwen2.5-vl", "qwen3.5"))]
)
def test_videos(name: str, lora: bool) -> None:
    """Beside images, alone and in none of a batch's rows."""
    rows = filmed_rows(make_seeing(name), ("iv", "", "", "v", "v", "i", "", "", "iv", "v"))
    pair = train_both(
        lambda: make(name, lora=lora),
        rows,
        data_collator=collated,
        eval_dataset=rows[:5],
        eval_strategy="epoch",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
    )
    engine: Any = pair.ours._engine()
    assert not isinstance(engine, AutoRoundPipe)
    assert_same(pair)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-vl"])
def test_no_logits_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of models that Trainer counts no items for: the head is not called in training or for
    the loss of an evaluation, so its chunks are all that there is."""
    rows = seen_rows(make_seeing(name), NUM_IMAGES)
    called: list[tuple[int, ...]] = []
    forward = torch.nn.Linear.forward

    def noting(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.out_features == VOCABULARY:
            called.append(tuple(hidden_states.shape))
        return forward(self, hidden_states)

    trainer = make_trainer(
        RoundPipeTrainer,
        make(name, lora=False),
        rows,
        data_collator=collated,
        eval_dataset=rows[:4],
        prediction_loss_only=True,
        devices=2,
    )
    trainer._engine()  # whose trial compares logits
    monkeypatch.setattr(torch.nn.Linear, "forward", noting)
    trainer.train()
    trainer.evaluate()
    assert not called


def mean_of_rows(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A mean over rows of how large their logits are."""
    loss: torch.Tensor = outputs.logits.square().mean(dim=(1, 2)).mean()
    return loss


@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_declared_losses(name: str) -> None:
    """One that is declared rightly trains as in the plain Trainer; a wrong declaration is found on
    rows with images as on others."""
    settings: dict[str, Any] = {
        "data_collator": collated,
        "per_device_train_batch_size": 5,
        "compute_loss_func": mean_of_rows,
    }
    rows = seen_rows(make_seeing(name), NUM_IMAGES)
    assert_same(train_both(lambda: make(name, lora=False), rows, loss_reduction="rows", **settings))
    wrong = make_trainer(
        RoundPipeTrainer, make(name, lora=False), rows, loss_reduction="sum", **settings
    )
    with pytest.raises(ConfigError, match="two rows together"):
        wrong.train()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    ("name", "lost", "message"),
    [
        (
            "llava",
            "pixel_values",
            r"row 2 has 4 placeholders of images, but the 0 images from number 2 on.* make 0 "
            r"tokens.*max_length=None",
        ),
        (
            "qwen3-vl-moe",
            "image_grid_thw",
            "pixel_values has 48 patches, but there is no image_grid_thw.*processor",
        ),
    ],
)
def test_wrong_images_are_refused_before_any_work(
    name: str, lost: str, message: str, devices: int
) -> None:
    """Training and evaluation; the weights stay what they were."""

    def lossy(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collated(rows)
        return batch | {lost: batch[lost][:2] if lost == "pixel_values" else None}

    rows = seen_rows(make_seeing(name), (1, 1, 1))
    trainer = make_trainer(
        RoundPipeTrainer,
        make_seeing(name),
        rows,
        devices=devices,
        data_collator=lossy,
        eval_dataset=rows,
        train_sampling_strategy="sequential",
    )
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match=message):
            run()
    before = dict(make_seeing(name).named_parameters())
    for parameter_name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[parameter_name])
