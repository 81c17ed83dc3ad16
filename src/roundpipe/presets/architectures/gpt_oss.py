"""GPT-OSS: a decoder with experts in every block, whose config says block by block which attend
within a window.

The experts' weights are stacked, (experts, ...) per matrix, as transformers keeps them. Unlike its
relatives the model makes its masks without looking at ``position_ids``, so packed documents attend
to each other, here as there; with flash kwargs (``cu_seq_lens_*``) they do not.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..balance import RoutedHeadAndLoss, assemble_routed
from ..preset import Cut
from ..routing import RoutedBlock, RoutedPrefix


class Prefix(RoutedPrefix):
    """First layer, with masks that know nothing of positions."""

    def _masks(
        self,
        embeds: torch.Tensor,
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        return super()._masks(embeds, attention_mask, None, kwargs)


def cut(model: PreTrainedModel) -> Cut:
    """Block ``i`` attends as ``config.layer_types[i]`` says."""
    backbone: Any = model.model
    kinds = model.config.layer_types[: len(backbone.layers)]
    last = RoutedHeadAndLoss(model, backbone.norm, model.lm_head)
    return assemble_routed(
        model,
        Prefix(backbone, kinds),
        [
            RoutedBlock(block, kind, "mlp.router")
            for block, kind in zip(backbone.layers, kinds, strict=True)
        ],
        last,
        last.balance,
    )
