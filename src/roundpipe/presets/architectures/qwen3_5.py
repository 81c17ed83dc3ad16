"""Qwen3.5: the tower of Qwen3-VL without features of several depths, before a language model whose
blocks attend in linear time but for every fourth."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..images import SIGHTS, grid_images, grid_positions
from ..preset import Cut
from ..vision import Family
from ..vision import cut as cut_family
from .qwen2_5_vl import takes_grid


def _seen(tower: Any, hidden_states: torch.Tensor, _: Any, __: Any) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(pooler_output=tower["merger"](hidden_states))


def cut(model: PreTrainedModel) -> Cut:
    """The language model may have experts."""
    family = Family(
        tower="visual",
        sights=SIGHTS,
        measure=grid_images,
        positions=grid_positions,
        after=("merger",),
        seen=_seen,
        takes=takes_grid,
    )
    return cut_family(model, family)
