"""Clipping by the global norm of the whole model, inside ``step_fn``."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from ..kernels.updates import sum_of_squares
from ..params.window import Master
from ..step import context


def clip_grad_norm_(optimizer_or_model: Any, max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their global 2-norm is at most ``max_norm``.

    Gradients are read as they were offloaded and are not written: the factor is applied when an
    optimizer reads them. Nor are they read twice: devices send the sums of squares along, unless
    several calls or uses of a weight were added up.

    Args:
        optimizer_or_model: an optimizer over masters, or the engine.
        max_norm: the limit; ``inf`` only measures.

    Returns:
        The norm before clipping, a 0-d fp32 tensor on the CPU. A tied weight counts once.

    Raises:
        ConfigError: outside ``step_fn``, where there is no gradient.

    Example:
        >>> def step_fn():
        ...     norm = roundpipe.clip_grad_norm_(optimizer, 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return norm
    """
    step = context.current_step()
    if step is None:
        raise ConfigError(
            "clip_grad_norm_ was called outside step_fn, where there is no gradient; call it inside"
        )
    masters = list(_masters_of(optimizer_or_model))
    others = [one for one in masters if not isinstance(one, Master) and one.grad is not None]
    if others and step.ranks.count > 1:
        raise ConfigError(
            f"clip_grad_norm_ was given a parameter of shape {tuple(others[0].shape)} that is not "
            "the engine's: each process has another gradient of it, as only those of the engine's "
            "are summed over its process group; give the engine the whole model"
        )
    own = math.fsum(_squares([master for master in masters if isinstance(master, Master)]))
    # In each rank a part of the gradients.
    total = step.ranks.combined([own], torch.add)[0] + math.fsum(_squares(others))
    norm = math.sqrt(total) if total >= 0 else total
    # As torch: 1e-6 keeps the factor finite, and it never exceeds 1. A norm that is not finite
    # stays visible.
    factor = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else max_norm / (norm + 1e-6)
    if factor != 1.0:
        for master in masters:
            _scale(master, factor)
    return torch.tensor(norm, dtype=torch.float32)


def _masters_of(optimizer_or_model: Any) -> Iterable[torch.Tensor]:
    if isinstance(optimizer_or_model, torch.optim.Optimizer):
        return context.parameters_of(optimizer_or_model)
    masters: Iterable[torch.Tensor] = optimizer_or_model.optim_parameters()
    return masters


def _squares(parameters: Sequence[torch.Tensor]) -> Iterator[float]:
    for parameter, square in zip(parameters, offloaded_squares(parameters), strict=True):
        if not isinstance(parameter, Master):
            if parameter.grad is not None:
                yield float(parameter.grad.double().square().sum())
        elif square is not None:
            yield square * parameter.scale**2
        elif parameter.offloaded():
            yield sum_of_squares(parameter.offloaded()) * parameter.scale**2


def offloaded_squares(parameters: Sequence[torch.Tensor]) -> list[float | None]:
    """Sums of squares of gradients before ``scale`` is applied, where devices have sent them along;
    elsewhere None."""
    norms = [
        parameter.gradient_norms if isinstance(parameter, Master) else None
        for parameter in parameters
    ]
    sent = [own for own in norms if own is not None]
    # All in one call of torch's, because after each the interpreter has to be waited for again.
    found = iter(torch.stack(torch._foreach_norm(sent)).square().tolist() if sent else ())
    return [None if own is None else next(found) for own in norms]


def _scale(master: torch.Tensor, factor: float) -> None:
    if isinstance(master, Master):
        master.scale *= factor
    elif master.grad is not None:
        master.grad.mul_(factor)
