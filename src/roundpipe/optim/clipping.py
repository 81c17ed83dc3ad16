"""Clipping by the global norm of the whole model, inside ``step_fn``."""

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from . import context


def clip_grad_norm_(optimizer_or_model: Any, max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their global 2-norm is at most ``max_norm``.

    Args:
        optimizer_or_model: an optimizer over masters, or the engine.
        max_norm: the limit; ``inf`` only measures.

    Returns:
        The norm before clipping, a 0-d tensor. A tied weight counts once.

    Raises:
        ConfigError: outside ``step_fn``, where there is no gradient.
    """
    if context.current_step() is None:
        raise ConfigError("clip_grad_norm_ was called outside step_fn, where there is no gradient; call it inside")
    return torch.nn.utils.clip_grad_norm_(_masters_of(optimizer_or_model), max_norm)


def _masters_of(optimizer_or_model: Any) -> Iterable[torch.Tensor]:
    if isinstance(optimizer_or_model, torch.optim.Optimizer):
        return [parameter for group in optimizer_or_model.param_groups for parameter in group["params"]]
    masters: Iterable[torch.Tensor] = optimizer_or_model.optim_parameters()
    return masters
