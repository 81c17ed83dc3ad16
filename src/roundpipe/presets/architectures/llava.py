"""LLaVA: a CLIP or SigLIP tower, whose hidden states at one or several depths are projected.

The language model may be any that the generic preset takes. Towers that read images of different
sizes (Pixtral) run part by part.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ...errors import ConfigError
from ..images import Image, Sight
from ..preset import Cut, DoesNotFit
from ..vision import Family
from ..vision import cut as cut_family

_TOWERS = ("CLIPVisionModel", "SiglipVisionModel")


def _measure(model: Any, named: Mapping[str, Any], sight: Sight) -> list[Image]:
    asked = named.get("vision_feature_layer")
    if asked is not None and asked != model.config.vision_feature_layer:
        raise ConfigError(
            f"vision_feature_layer is {asked} in this call and "
            f"{model.config.vision_feature_layer} in the config, by which the model was cut"
        )
    strategy = named.get("vision_feature_select_strategy")
    strategy = model.config.vision_feature_select_strategy if strategy is None else strategy
    height, width = named[sight.pixels].shape[-2:]
    side = model.config.vision_config.patch_size
    has_class = hasattr(model.model.vision_tower.embeddings, "class_embedding")
    tokens = (height // side) * (width // side) + has_class - (strategy == "default")
    return [Image(1, tokens)] * len(named[sight.pixels])


def _keeps(model: Any) -> list[int]:
    layers = model.config.vision_feature_layer
    places = model.config.vision_config.num_hidden_layers + 1
    return sorted({at % places for at in ([layers] if isinstance(layers, int) else layers)})


def _seen(
    places: int, tower: Any, hidden_states: Any, kept: Mapping[int, torch.Tensor], sizes: Any
) -> BaseModelOutputWithPooling:
    states: Any = tuple(kept.get(place) for place in range(places))
    return BaseModelOutputWithPooling(hidden_states=states)


def cut(model: PreTrainedModel) -> Cut:
    """The places of the tower's hidden states count from its end where they are negative."""
    inner: Any = model.model
    if type(inner.vision_tower).__name__ not in _TOWERS:
        raise DoesNotFit(f"its tower is a {type(inner.vision_tower).__name__}")
    places = model.config.vision_config.num_hidden_layers + 1
    family = Family(
        tower="vision_tower",
        measure=_measure,
        after=("post_layernorm", "head"),
        seen=partial(_seen, places),
        keeps=_keeps,
    )
    return cut_family(model, family)
