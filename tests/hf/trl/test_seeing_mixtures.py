"""Mixtures of experts that see are fine-tuned by TRL's own processing of images as with TRL: rows
with images and without, adapters of the experts among those of the tower."""

from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from transformers import ProcessorMixin, Qwen3_5MoeForConditionalGeneration
from trl import SFTTrainer

from roundpipe import AutoRoundPipe
from roundpipe.errors import ConfigError
from roundpipe_hf.trl import RoundPipeSFTTrainer
from tests.hf.trl import test_images as images
from tests.support.example_data import sentences
from tests.support.mixtures import STACKS
from tests.support.trainers import Pair, assert_same, logged, run
from tests.support.vision_models import make_seeing

of_patches = images.of_patches
TARGETS = {"qwen3-vl-moe": ["qkv", "q_proj", "v_proj"], "qwen3.5-moe": ["qkv", "q_proj"]}


def rows(image: str) -> Dataset:
    """As many placeholders of whole images as there are pictures; TRL's collator has the processor
    make tokens of each."""
    count = len(images.NUM_IMAGES)
    texts = [
        f"{image} , " * number + text
        for number, text in zip(images.NUM_IMAGES, sentences(count), strict=True)
    ]
    features = Features({"images": List(Image()), "text": Value("string")})
    pictures = images.pictures(images.NUM_IMAGES)
    return Dataset.from_dict({"images": pictures, "text": texts}, features=features)


def model_of(name: str, processor: Any) -> Any:
    """With a coefficient that would show if the routers' loss were left out. TRL adds it unless
    told not to where the config can ask for it: Qwen3.5's, and from transformers 5.24 on Qwen3-VL's
    too."""
    model = make_seeing(name)
    model.config.text_config.router_aux_loss_coef = 0.5
    model.config.image_token_id = processor.image_token_id
    # No token, because texts may have any, and it would have to have a video.
    model.config.video_token_id = -1
    return model


def adapters_of(name: str) -> LoraConfig:
    return LoraConfig(
        r=2,
        lora_alpha=2,
        target_modules=TARGETS[name],
        target_parameters=STACKS,
        init_lora_weights=False,
    )


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("adapts", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", TARGETS)
def test_sft(of_patches: ProcessorMixin, name: str, adapts: bool, devices: int) -> None:
    """Losses, gradient norms, TRL's metrics and evaluation, and all weights. The routers' loss was
    refused."""
    pair = Pair(
        *(
            images.make(
                cls,
                of_patches,
                model_of(name, of_patches),
                data=rows(of_patches.image_token),
                peft_config=adapters_of(name) if adapts else None,
                devices=devices,
            )
            for cls in (RoundPipeSFTTrainer, SFTTrainer)
        )
    )
    engine: Any = pair.ours._engine()
    assert not isinstance(engine, AutoRoundPipe)
    names = [name for name, weight in pair.ours.model.named_parameters() if weight.requires_grad]
    assert any("experts" in name for name in names)
    before = {name: value.clone() for name, value in pair.plain.model.state_dict().items()}
    for trainer in pair:
        run(trainer)
    assert logged(pair.ours)[0]["grad_norm"] > 0
    assert "aux_loss" in logged(pair.ours)[0] or name == "qwen3-vl-moe"
    trained = pair.plain.model.state_dict()
    assert all(not torch.equal(trained[name], before[name]) for name in names if "expert" in name)
    assert_same(pair)
    engine.close()


@pytest.mark.parametrize("method", ["dpo", "kto", "grpo", "rloo"])
def test_preferences_and_rewards(of_patches: ProcessorMixin, method: str) -> None:
    """With the routers' loss, and pictures in some rows (of rollouts in all)."""
    pair = Pair(
        *(
            images.trainer_of(
                method,
                is_ours,
                of_patches,
                model=model_of("qwen3.5-moe", of_patches),
                peft_config=adapters_of("qwen3.5-moe"),
                devices=3,
            )
            for is_ours in (True, False)
        )
    )
    for trainer in pair:
        run(trainer)
    assert "aux_loss" in logged(pair.ours)[0]
    assert_same(pair)
    pair.ours.model_wrapped.close()


def test_routers_that_nobody_understands(
    of_patches: ProcessorMixin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by name, with what to do, which then trains."""
    monkeypatch.setattr(Qwen3_5MoeForConditionalGeneration, "_can_record_outputs", {})
    settings: dict[str, Any] = {
        "data": rows(of_patches.image_token),
        "peft_config": adapters_of("qwen3.5-moe"),
    }
    model = model_of("qwen3.5-moe", of_patches)
    with pytest.raises(ConfigError, match="Qwen3_5MoeForCond.*set router_aux_loss_coef=0.0"):
        images.make(RoundPipeSFTTrainer, of_patches, model, **settings)
    model = model_of("qwen3.5-moe", of_patches)
    model.config.text_config.router_aux_loss_coef = 0.0
    trainer = run(images.make(RoundPipeSFTTrainer, of_patches, model, **settings))
    assert "aux_loss" not in logged(trainer)[0]
    trainer.model_wrapped.close()


def test_rows_that_are_cut_to_a_length(of_patches: ProcessorMixin) -> None:
    """TRL cuts prompts with their completions, placeholders among them, but no images. Its own
    error asks for a larger `max_length`, and so does ours."""
    answered = images.preferences("kto", of_patches.image_token).remove_columns("label")
    trainer = images.make(
        RoundPipeSFTTrainer,
        of_patches,
        model_of("qwen3-vl-moe", of_patches),
        data=answered,
    )
    trainer.data_collator.max_length = 2
    message = r"there are \d images, but all rows .* placeholders of \d;.*max_length=None"
    with pytest.raises(ConfigError, match=message):
        trainer.train()
    trainer.model_wrapped.close()
