"""What every one of TRL's trainers refuses here, by name and before any work is done."""

from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.presets.preset import has_own_preset

from ..compat import base_model


def refuse_data_and_model(trainer: Any) -> None:
    """Called when TRL's constructor has set ``trainer`` up.

    Raises:
        ConfigError: the data has images, or the loss asks for the router's of a model whose preset
            does not collect it.
    """
    name = type(trainer).__name__
    if getattr(trainer, "_is_vision_dataset", False):
        raise ConfigError(
            f"{name} does not support data sets with images: no preset cuts such models"
        )
    if getattr(trainer, "aux_loss_enabled", False) and not has_own_preset(trainer.model):
        raise ConfigError(
            f"{name} cannot add a router's auxiliary loss (router_aux_loss_coef="
            f"{trainer.router_aux_loss_coef}) for {type(base_model(trainer.model)).__name__}: only "
            "presets of their own collect what routers say, which are those of Qwen3-MoE, Mixtral "
            "and GPT-OSS; set router_aux_loss_coef=0.0"
        )
