"""Qwen3-VL: what some of the tower's blocks return is merged, each by a module of its own, and
added to the hidden states after the language model's first blocks (deepstack)."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from ..images import SIGHTS, grid_images, grid_positions
from ..preset import Cut
from ..vision import Family
from ..vision import cut as cut_family
from .qwen2_5_vl import takes_grid


def _keeps(model: Any) -> list[int]:
    return [index + 1 for index in model.config.vision_config.deepstack_visual_indexes]


def _seen(
    tower: Any, hidden_states: torch.Tensor, kept: Mapping[int, torch.Tensor], _: Any
) -> BaseModelOutputWithDeepstackFeatures:
    mergers = tower["deepstack_merger_list"]
    features: Any = [merger(kept[at]) for merger, at in zip(mergers, sorted(kept), strict=True)]
    merged = tower["merger"](hidden_states)
    return BaseModelOutputWithDeepstackFeatures(pooler_output=merged, deepstack_features=features)


def cut(model: PreTrainedModel) -> Cut:
    """Each of the language model's first blocks has one of the tower's depths."""
    family = Family(
        tower="visual",
        sights=SIGHTS,
        measure=grid_images,
        positions=grid_positions,
        after=("merger", "deepstack_merger_list"),
        seen=_seen,
        keeps=_keeps,
        takes=takes_grid,
        blinded={"deepstack_visual_indexes": ()},
        between="_deepstack_process",
    )
    return cut_family(model, family)
