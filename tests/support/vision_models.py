"""Tiny random models that see, and batches with images in some of their rows.

Dropout is off, so that a model's own forward is the oracle.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    SiglipVisionConfig,
)

from tests.support.preset_models import ROWS, TINY, TOKENS, tokens

IMAGE = 60  # the placeholder's id
NUM_IMAGES = (1, 0, 2, 1)  # in each row
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]


def llava(**settings: Any) -> Any:
    """Four tokens an image, of the tower's last but one hidden states."""
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**TOWER),
            text_config=LlamaConfig(**TINY),
            image_token_id=IMAGE,
            **settings,
        )
    )


def llava_of_two_depths() -> Any:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=SiglipVisionConfig(**TOWER, vision_use_head=False),
            text_config=MistralConfig(**TINY, sliding_window=5),
            image_token_id=IMAGE,
            vision_feature_layer=[0, -1],
            vision_feature_select_strategy="full",
        )
    )


def gemma3() -> Any:
    """Four tokens an image."""
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SiglipVisionConfig(**TOWER | {"image_size": 16}, vision_use_head=False),
            text_config=Gemma3TextConfig(
                **TINY, head_dim=8, sliding_window=5, layer_types=_WINDOWS
            ),
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
        )
    )


SEEING: dict[str, Callable[[], Any]] = {
    "llava": llava,
    "llava-two-depths": llava_of_two_depths,
    "gemma3": gemma3,
}


def make_seeing(name: str) -> Any:
    """In training mode, seeded."""
    torch.manual_seed(0)
    return SEEING[name]().train()


def ids_with_images(num_images: tuple[int, ...], tokens_each: int = 4) -> Tensor:
    """Rows with that many images, each after a token of text."""
    ids = tokens(len(num_images)) % (IMAGE - 1) + 1
    for row, number in enumerate(num_images):
        for image in range(number):
            start = 1 + image * (tokens_each + 1)
            ids[row, start : start + tokens_each] = IMAGE
    return ids


def seen_batch(model: Any, num_images: tuple[int, ...] = NUM_IMAGES) -> dict[str, Any]:
    """Row 1 ends in padding."""
    ids = ids_with_images(num_images)
    mask = torch.ones_like(ids)
    mask[1, TOKENS - 3 :] = 0
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids == IMAGE), -100),
    }
    if model.config.model_type == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE).long()
    if sum(num_images):
        side = model.config.vision_config.image_size
        generator = torch.Generator().manual_seed(4)
        batch["pixel_values"] = torch.randn(sum(num_images), 3, side, side, generator=generator)
    return batch


NO_IMAGES = (0,) * ROWS
