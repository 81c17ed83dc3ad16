"""Qwen2.5-VL: a tower whose patches are sorted by the windows that they attend within, and put back
in order after its blocks."""

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.vision_utils import get_vision_window_index

from ..images import SIGHTS, grid_images, grid_positions
from ..preset import Cut
from ..vision import Family
from ..vision import cut as cut_family


def takes_grid(sizes: torch.Tensor | None) -> dict[str, Any]:
    """What Qwen's towers are given besides the patches."""
    return {"grid_thw": sizes}


def _seen(
    config: Any, tower: Any, hidden_states: torch.Tensor, _: Any, sizes: Any
) -> BaseModelOutputWithPooling:
    window_index, _ = get_vision_window_index(
        sizes,
        spatial_merge_size=config.spatial_merge_size,
        window_size=config.window_size,
        patch_size=config.patch_size,
    )
    merged = tower["merger"](hidden_states)[torch.argsort(window_index), :]
    return BaseModelOutputWithPooling(pooler_output=merged)


def _kinds(model: Any) -> list[int]:
    config = model.config.vision_config
    kinds = [int(index in config.fullatt_block_indexes) for index in range(config.depth)]
    return kinds if 0 in kinds else [0] * len(kinds)


def cut(model: PreTrainedModel) -> Cut:
    """Blocks of the tower attend within windows, some to whole images."""
    family = Family(
        tower="visual",
        sights=SIGHTS,
        measure=grid_images,
        positions=grid_positions,
        after=("merger",),
        seen=partial(_seen, model.config.vision_config),
        takes=takes_grid,
        kinds=_kinds,
    )
    return cut_family(model, family)
