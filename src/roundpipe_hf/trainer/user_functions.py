"""Functions and methods of the user's own, as Trainer is to see them."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from transformers import Trainer

from roundpipe.errors import ConfigError

from ..arguments import HOST, losses_on
from ..engine.watchers import Shown, has_own_step
from .window import AccumulationWindow

_GRADIENT_OF = cast(Any, torch.Tensor.grad).__get__  # a property of torch's own
_PIPELINE = ("roundpipe.", "roundpipe_hf.")


def takes_num_items(compute_loss: Callable[..., Any]) -> bool:
    parameters = inspect.signature(compute_loss).parameters
    takes_any = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return takes_any or "num_items_in_batch" in parameters


def without_num_items(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute_loss)
    def call(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return compute_loss(*args, **kwargs)

    return call


def as_own_step(
    trainer: Trainer, window: AccumulationWindow, training_step: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A step that is not our mixin's, whose loss may be that of an engine call and so in host
    memory: Trainer adds up losses on the device that it takes for the model's. The user's own may
    read gradients where they are, and not change them."""
    is_watched = has_own_step(trainer)  # not those that generate, because it slows every operation

    @functools.wraps(training_step)
    def call(*inputs: Any, **kwargs: Any) -> torch.Tensor:
        reads = _GradientReads(trainer, window)
        with losses_on(HOST), reads if is_watched else contextlib.nullcontext():
            loss = training_step(*inputs, **kwargs)
        reads.refuse_changes()
        return loss.to(trainer.args.device)

    return call


class _GradientReads(TorchFunctionMode):
    """Sees who reads ``.grad`` of the model's parameters: the pipeline's gradients are not there
    before ``synchronize()``, and clipping or changing them would silently do nothing."""

    def __init__(self, trainer: Any, window: AccumulationWindow) -> None:
        super().__init__()
        self._trainer, self._window = trainer, window
        self._names: dict[torch.Tensor, str] | None = None
        self._read: dict[torch.Tensor, Shown] = {}
        self._seen_none_at: bool | None = None  # of whether a round has left gradients

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.backward:
            self._seen_none_at = None
        elif func == _GRADIENT_OF and isinstance(args[0], torch.nn.Parameter):
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if not f"{reader}.".startswith(_PIPELINE):
                self._is_read(args[0], result)
        return result

    def refuse_changes(self) -> None:
        """Raises where a gradient was changed after it was read: it is a copy."""
        for parameter, gradient, version in self._read.values():
            if gradient._version != version:
                raise ConfigError(
                    f"training_step changed the gradient of {self._name(parameter)!r}, which is a "
                    "copy of the pipeline's: clip with max_grad_norm, and change gradients in the "
                    "step of an optimizer of your own, see optimizer_cls_and_kwargs"
                )

    def _is_read(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        name = self._name(parameter)
        if name is None:
            return
        if gradient is not None:
            self._read.setdefault(gradient, Shown(parameter, gradient, gradient._version))
            return
        has_run = self._window.has_run
        if self._seen_none_at == has_run:
            return  # because for each of many parameters, waiting would take seconds
        self._trainer.synchronize()
        self._seen_none_at = has_run
        if parameter.grad is not None:
            raise ConfigError(
                f"training_step reads the gradient of {name!r} before it is there: the pipeline "
                "keeps gradients. Call self.synchronize() after the backward, which puts copies "
                "into .grad; clip with max_grad_norm, and change gradients in the step of an "
                "optimizer of your own, see optimizer_cls_and_kwargs"
            )

    def _name(self, parameter: torch.Tensor) -> str | None:
        """Its name in the model; None if it is a loss's own, or requires no gradient."""
        if self._names is None:
            named = self._trainer.model.named_parameters()
            self._names = {weight: name for name, weight in named if weight.requires_grad}
        return self._names.get(parameter)
