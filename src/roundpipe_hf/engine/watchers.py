"""Whether anybody may look at the model's weights between an update and the next use of the engine,
or at gradients.

A synchronous step writes back to the model behind the caller's back, while the next round's first
stages already go up; whatever the engine does itself waits layer by layer, and evaluation and
saving wait for all of it. So the step is only made to wait where code that is not ours or Hugging
Face's comes in between.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe.engine.weights import let_pass
from roundpipe.errors import ConfigError
from roundpipe.layers.parameters import sum_of_bytes

# Callbacks of transformers read weights only while saving; some of TRL's do at every step.
_CALLBACKS, _TRAINERS = ("transformers.",), ("transformers.", "trl.", "roundpipe_hf.")
# What Trainer calls after the step and before the next round, besides callbacks.
_BETWEEN = (
    "training_step",
    "_prepare_inputs",
    "get_batch_samples",
    "log",
    "_maybe_log_save_evaluate",
    "floating_point_ops",
)


def reads_weights(trainer: Any) -> bool:
    """Whether a callback, or an override of a method called between steps, is somebody else's."""
    if not all(
        _comes_from(type(callback), _CALLBACKS) for callback in trainer.callback_handler.callbacks
    ):
        return True
    owners = [cls for cls in type(trainer).__mro__ if any(name in vars(cls) for name in _BETWEEN)]
    return not all(_comes_from(cls, _TRAINERS) for cls in owners) or any(
        name in vars(trainer) for name in _BETWEEN
    )


def has_own(trainer: Any, method: str) -> bool:
    """Tells if ``training_step``, say, is somebody else's."""
    owner = next(cls for cls in type(trainer).__mro__ if method in vars(cls))
    return method in vars(trainer) or not _comes_from(owner, _TRAINERS)


class Shown(NamedTuple):
    """A gradient as a callback, or a training step of somebody else's, was given it; None where
    there was none."""

    parameter: nn.Parameter
    gradient: torch.Tensor | None
    version: int
    total: int

    @classmethod
    def of(cls, parameter: nn.Parameter) -> "Shown":
        """Notes what is in its ``.grad`` now."""
        gradient = parameter.grad
        if gradient is None:
            return cls(parameter, None, 0, 0)
        return cls(parameter, gradient, gradient._version, int(sum_of_bytes(gradient)))

    def was_written(self) -> bool:
        """Whether somebody has changed the numbers, through ``.data`` and NumPy as well."""
        return self.gradient is not None and (
            self.gradient._version != self.version or int(sum_of_bytes(self.gradient)) != self.total
        )


def reads_gradients(trainer: Any) -> bool:
    """Whether a callback of somebody else's is called between clipping and the update."""
    calls = [
        type(callback).on_pre_optimizer_step for callback in trainer.callback_handler.callbacks
    ]
    return not all(f"{call.__module__}.".startswith(_CALLBACKS) for call in calls)


def show_gradients(trainer: Any, penalties: Mapping[torch.Tensor, torch.Tensor]) -> list[Shown]:
    """Puts copies of the gradients into the model's ``.grad``, unscaled and clipped, as Trainer has
    them there then.

    The engine's own stay where they are: they are clipped in the optimizer's step, which adds
    ``penalties``.
    """
    trainer.synchronize()
    for parameter, gradient in penalties.items():
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    trainer.average_over_processes(trained)
    parameters = [parameter for parameter in trained if parameter.grad is not None]
    if trainer.scaler is not None:
        for parameter in parameters:
            parameter.grad.div_(trainer.scaler.get_scale())
    if trainer.args.max_grad_norm > 0:
        nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm)
    let_pass(trained)
    return [Shown.of(parameter) for parameter in trained]


def refuse_written(shown: Sequence[Shown]) -> None:
    """Raises where a callback has changed what it was given: the update would not know."""
    for one in shown:
        if one.parameter.grad is not one.gradient or one.was_written():
            raise ConfigError(
                "a callback changed gradients in on_pre_optimizer_step, but sees copies of them "
                "there: change them in "
                "the step of an optimizer of your own, see optimizer_cls_and_kwargs"
            )


def _comes_from(cls: type, packages: tuple[str, ...]) -> bool:
    return f"{cls.__module__}.".startswith(packages)
