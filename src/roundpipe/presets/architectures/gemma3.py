"""Gemma 3 with images: a SigLIP tower, of which every image makes the same number of tokens, and
masks by which an image's tokens see each other."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..images import Image, Sight
from ..preset import Cut
from ..vision import Family
from ..vision import cut as cut_family


def _measure(model: Any, named: Mapping[str, Any], sight: Sight) -> list[Image]:
    return [Image(1, model.config.mm_tokens_per_image)] * len(named[sight.pixels])


def _seen(tower: Any, hidden_states: torch.Tensor, _: Any, __: Any) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(last_hidden_state=tower["post_layernorm"](hidden_states))


def cut(model: PreTrainedModel) -> Cut:
    """The tower's pooling head, which some have, is not used."""
    after = ("post_layernorm", "head")
    return cut_family(
        model, Family(tower="vision_tower", measure=_measure, after=after, seen=_seen)
    )
