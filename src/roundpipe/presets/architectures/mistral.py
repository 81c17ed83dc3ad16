"""Mistral: Llama with one sliding window for all blocks, or none."""

from transformers import PreTrainedModel

from ..preset import Cut
from .llama import cut_decoder


def cut(model: PreTrainedModel) -> Cut:
    """Every block attends within the window if the config has one."""
    kind = "full_attention" if model.config.sliding_window is None else "sliding_attention"
    return cut_decoder(model, [kind] * model.config.num_hidden_layers)
