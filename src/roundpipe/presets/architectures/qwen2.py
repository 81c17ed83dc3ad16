"""Qwen2 and Qwen3: Llama whose config says block by block which of them attend within a sliding
window."""

from transformers import PreTrainedModel

from ..preset import Cut
from .llama import cut_decoder


def cut(model: PreTrainedModel) -> Cut:
    """Block ``i`` attends as ``config.layer_types[i]`` says."""
    return cut_decoder(model, list(model.config.layer_types))
