"""What every one of TRL's trainers refuses here, by name and before any work is done."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.presets import decoder
from roundpipe.presets.preset import has_causal_preset, has_images

from ..compat import base_model
from .compat import is_async_callable


def refuse_data_and_model(trainer: Any) -> None:
    """Called when TRL's constructor has set ``trainer`` up.

    Raises:
        ConfigError: the data has images that a model's preset does not take, the reference model
            has another vocabulary, or the loss asks for the router's of a model whose routers are
            not understood.
    """
    name = type(trainer).__name__
    reference = getattr(trainer, "ref_model", None)
    for model in (trainer.model, reference):
        if model is not None and _has_pictures(trainer) and not has_images(model):
            raise ConfigError(
                f"{name} does not support data sets with images for "
                f"{type(base_model(model)).__name__}: it has no preset that takes images, as those "
                "of docs/models.md have"
            )
    sizes = _vocabulary(trainer.model), _vocabulary(reference)
    if reference is not None and sizes[0] != sizes[1]:
        raise ConfigError(
            f"{name} was given a reference model with another vocabulary: {sizes[1]} tokens, and "
            f"the model has {sizes[0]}, so the same number is not the same token. Give one of the "
            "model's family, or call resize_token_embeddings on both alike"
        )
    base = base_model(trainer.model)
    if getattr(trainer, "aux_loss_enabled", False) and not _hears_routers(base):
        raise ConfigError(
            f"{name} cannot add a router's auxiliary loss (router_aux_loss_coef="
            f"{trainer.router_aux_loss_coef}) for {type(base).__name__}: what its routers say, or "
            "what its loss makes of it, is not understood; set router_aux_loss_coef=0.0"
        )


def _hears_routers(model: Any) -> bool:
    if has_images(model):
        return decoder.collects_router_logits(model, model.model.language_model)
    return has_causal_preset(model) or decoder.collects_router_logits(model)


def _has_pictures(trainer: Any) -> bool:
    """As far as TRL or the names of the data's columns say."""
    known: bool | None = getattr(trainer, "_is_vision_dataset", None)
    if known is not None:
        return known
    names = getattr(getattr(trainer, "train_dataset", None), "column_names", None)
    return bool({"image", "images"}.intersection(names or ()))


def _vocabulary(model: Any) -> int | None:
    config = getattr(base_model(model), "config", None)
    size: int | None = getattr(config, "vocab_size", None)
    return size


def refuse_odd_pairs(trainer: str, inputs: Any) -> None:
    """Raises ConfigError for a batch that is no pairs: half a pair would silently be compared with
    several rows."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if isinstance(ids, torch.Tensor) and len(ids) % 2:
        raise ConfigError(
            f"{trainer} was given a batch of {len(ids)} rows, which are no pairs: the data "
            "collator has to put all chosen rows first and as many rejected ones behind them"
        )


def refuse_long_prompts(trainer: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ConfigError for a prompt that fills the model's context, before anything is
    generated."""
    config = trainer.model.config
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, prompts), default=0)
    if context is not None and longest >= context:
        raise ConfigError(
            f"{type(trainer).__name__} was given a prompt of {longest} tokens, and the model's "
            f"context has {context} (max_position_embeddings), which leaves no room for a "
            "completion; drop long prompts from the data set, or cut them"
        )


def checked_reward(name: str, reward: Callable[..., Any]) -> Callable[..., Any]:
    """``reward``, whose values are looked at. A reward model is left as it is.

    Raises:
        ConfigError: when called, if a value is no single number.
    """
    if isinstance(reward, nn.Module):
        return reward
    if is_async_callable(reward):

        @functools.wraps(reward)
        async def later(*args: Any, **kwargs: Any) -> Any:
            return _numbers(name, await reward(*args, **kwargs))

        return later

    @functools.wraps(reward)
    def now(*args: Any, **kwargs: Any) -> Any:
        return _numbers(name, reward(*args, **kwargs))

    return now


def _numbers(name: str, values: Any) -> Any:
    if not hasattr(values, "__iter__") or isinstance(values, str | bytes | Mapping):
        raise ConfigError(
            f"the reward function {name!r} returned a {type(values).__name__}; it must return a "
            "list with one number, or None, for each completion"
        )
    values = list(values)
    for row, value in enumerate(values):
        if value is not None and not _is_number(value):
            shape = tuple(getattr(value, "shape", ()))
            what = f"of shape {shape}" if shape else f"that is a {type(value).__name__}"
            raise ConfigError(
                f"the reward function {name!r} returned a value {what} for completion {row}; it "
                "must return one number, or None, for each completion"
            )
    return values


def _is_number(value: Any) -> bool:
    """As torch sees it: an array of one value is none, a tensor of one is."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return hasattr(value, "__float__") and not getattr(value, "shape", ())
