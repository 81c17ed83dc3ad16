"""Qwen3-MoE: Qwen3 whose blocks, but for some dense ones, send each token to a few of many experts.
Mixtral is built alike, without dense blocks.

The experts' weights are stacked, (experts, ...) per matrix, as transformers keeps them: one
parameter each, uploaded with its block.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..balance import RoutedHeadAndLoss, assemble_routed
from ..preset import Cut
from ..routing import RoutedBlock, RoutedPrefix
from .llama import Block


def cut(model: PreTrainedModel) -> Cut:
    """Every block attends within the window if the config has one."""
    backbone: Any = model.model
    blocks = backbone.layers[: model.config.num_hidden_layers]
    kind = "full_attention" if model.config.sliding_window is None else "sliding_attention"
    last = RoutedHeadAndLoss(model, backbone.norm, model.lm_head)
    return assemble_routed(
        model,
        RoutedPrefix(backbone, [kind]),
        [_block(block, kind) for block in blocks],
        last,
        last.balance,
    )


def _block(block: nn.Module, kind: str) -> Block:
    return (
        RoutedBlock(block, kind, "mlp.gate") if hasattr(block.mlp, "gate") else Block(block, kind)
    )
