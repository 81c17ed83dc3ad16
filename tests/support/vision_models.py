"""Tiny random models that see, and batches with images in some of their rows.

Dropout is off, so that a model's own forward is the oracle.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
)

from tests.support import mixtures
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
            **{"image_token_id": IMAGE, **settings},
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
    """Four tokens an image. Its projection would start at zero, and no image would count."""
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=SiglipVisionConfig(**TOWER | {"image_size": 16}, vision_use_head=False),
            text_config=Gemma3TextConfig(
                **TINY, head_dim=8, sliding_window=5, layer_types=_WINDOWS
            ),
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
        )
    )
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    return model


# Tokens are squares of two by two patches.
_PATCHES: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": TINY["hidden_size"],
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def qwen2_5_vl(**settings: Any) -> Any:
    """The tower's middle block attends to whole images, the others within windows of 16 x 16."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            vision_config={**_PATCHES, "window_size": 16, "fullatt_block_indexes": [1]},
            text_config={**TINY, "rope_parameters": _SECTIONS},
            **{"image_token_id": IMAGE, "video_token_id": IMAGE - 1, **settings},
        )
    )


def qwen3_vl() -> Any:
    """Two of the tower's depths are added to hidden states of the language model."""
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**_deepstack()))


def qwen3_vl_moe() -> Any:
    """The middle block of the language model has no experts. No matrix of theirs is square."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(**_deepstack(**experts, mlp_only_layers=[1]))
    )


def qwen3_5() -> Any:
    """Two of the language model's blocks attend in linear time."""
    return Qwen3_5ForConditionalGeneration(_of_linear_attention(Qwen3_5Config, "qwen3.5"))


def qwen3_5_moe() -> Any:
    return Qwen3_5MoeForConditionalGeneration(_of_linear_attention(Qwen3_5MoeConfig, "qwen3.5-moe"))


def _of_linear_attention(kind: Any, name: str) -> Any:
    sections = {**_SECTIONS, "partial_rotary_factor": 1.0}
    return kind(
        vision_config={**_PATCHES, "num_position_embeddings": 16},
        text_config=mixtures.CONFIGS[name]({**TINY, "rope_parameters": sections}).to_dict(),
        image_token_id=IMAGE,
        video_token_id=IMAGE - 1,
    )


def _deepstack(**of_text: Any) -> dict[str, Any]:
    return {
        "vision_config": {
            **_PATCHES,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        "text_config": {**TINY, "head_dim": 8, "rope_parameters": _SECTIONS, **of_text},
        "image_token_id": IMAGE,
        "video_token_id": IMAGE - 1,
    }


SEEING: dict[str, Callable[[], Any]] = {
    "llava": llava,
    "llava-two-depths": llava_of_two_depths,
    "gemma3": gemma3,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3-vl-moe": qwen3_vl_moe,
    "qwen3.5": qwen3_5,
    "qwen3.5-moe": qwen3_5_moe,
}
# (time, height, width) in patches: images of 4, 2 and 6 tokens, in turn.
_GRIDS = ((1, 4, 4), (1, 2, 4), (1, 6, 4))


def make_seeing(name: str) -> Any:
    """In training mode, seeded."""
    torch.manual_seed(0)
    return SEEING[name]().train()


def seen_batch(model: Any, num_images: tuple[int, ...] = NUM_IMAGES) -> dict[str, Any]:
    """Row 1 ends in padding, the last begins with it; images are one token of text apart."""
    has_sizes = "qwen" in model.config.model_type
    grids = [_GRIDS[i % 3] if has_sizes else _GRIDS[0] for i in range(sum(num_images))]
    sizes = iter(height * width // 4 for _, height, width in grids)
    ids = tokens(len(num_images)) % (IMAGE - 2) + 1
    for row, number in enumerate(num_images):
        end = 0
        for _ in range(number):
            start, end = end + 1, end + 1 + next(sizes)
            ids[row, start:end] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, TOKENS - 3 :] = 0
    mask[-1, 0] = 0
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids == IMAGE), -100),
    }
    if model.config.model_type != "llava":
        name = "mm_token_type_ids" if has_sizes else "token_type_ids"
        batch[name] = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(4)
    if grids and has_sizes:
        patches = sum(height * width for _, height, width in grids)
        batch["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
        batch["image_grid_thw"] = torch.tensor(grids)
    elif grids:
        side = model.config.vision_config.image_size
        batch["pixel_values"] = torch.randn(len(grids), 3, side, side, generator=generator)
    return batch


_LINED_UP = (
    *("pixel_values", "image_grid_thw"),
    *("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
)
FRAME = (2, 2, 4)  # a video's (time, height, width) in patches: two tokens in each of two frames


def filmed_batch(model: Any, rows: tuple[str, ...] = ("iv", "", "v", "i")) -> dict[str, Any]:
    """Each row has an image of four tokens ("i"), a video ("v"), both or none. Qwen3-VL and
    Qwen3.5 have text between the frames of a video, Qwen2.5-VL the seconds that one takes."""
    marks_time = model.config.model_type != "qwen2_5_vl"
    ids = tokens(len(rows)) % (IMAGE - 2) + 1
    for row, kinds in enumerate(rows):
        if "i" in kinds:
            ids[row, 1:5] = IMAGE
        if "v" in kinds:
            ids[row, 6:11] = IMAGE - 1
            ids[row, 8 if marks_time else 10] = 1
    mask = torch.ones_like(ids)
    mask[-1, 0] = 0
    is_seen = ids >= IMAGE - 1
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | is_seen, -100),
        "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == IMAGE - 1).long(),
    }
    generator = torch.Generator().manual_seed(4)
    for kind, grid, pixels, sizes in (
        ("i", _GRIDS[0], "pixel_values", "image_grid_thw"),
        ("v", FRAME, "pixel_values_videos", "video_grid_thw"),
    ):
        number = "".join(rows).count(kind)
        if number:
            lines = number * grid[0] * grid[1] * grid[2]
            batch[pixels] = torch.randn(lines, 3 * 2 * 4 * 4, generator=generator)
            batch[sizes] = torch.tensor([grid] * number)
    if "video_grid_thw" in batch and not marks_time:
        batch["second_per_grid_ts"] = torch.arange(1.0, 1.0 + len(batch["video_grid_thw"]))
    return batch


def filmed_rows(model: Any, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of such a batch, each with its image and its video, for `collated`."""
    batch, rows = filmed_batch(model, kinds), []
    for row, seen in enumerate(kinds):
        made = {}
        for name, value in batch.items():
            if name not in _LINED_UP:
                made[name] = value[row]
                continue
            kind = "i" if name in ("pixel_values", "image_grid_thw") else "v"
            size = len(value) // "".join(kinds).count(kind)
            start = size * "".join(kinds[:row]).count(kind)
            made[name] = value[start : start + size * (kind in seen)]
        rows.append(made)
    return rows


def seen_rows(model: Any, num_images: tuple[int, ...]) -> list[dict[str, Any]]:
    """The rows of such a batch, each with its images, for `collated`."""
    return [_row(seen_batch(model, num_images), num_images, row) for row in range(len(num_images))]


def _row(batch: dict[str, Any], num_images: tuple[int, ...], row: int) -> dict[str, Any]:
    start, end = sum(num_images[:row]), sum(num_images[: row + 1])
    grids = batch.get("image_grid_thw")
    lines = [1] * sum(num_images) if grids is None else grids.prod(dim=-1).tolist()
    pixels = slice(sum(lines[:start]), sum(lines[:end]))
    made = {}
    for name, value in batch.items():
        if name == "pixel_values":
            made[name] = value[pixels]
        else:
            made[name] = value[start:end] if name == "image_grid_thw" else value[row]
    return made


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As a processor has it: images of all rows in a line, and no key for them without any."""
    batch: dict[str, Any] = {}
    for name in rows[0]:
        join = torch.cat if name in _LINED_UP else torch.stack
        value = join([row[name] for row in rows])
        if len(value):
            batch[name] = value
    return batch


NO_IMAGES = (0,) * ROWS
