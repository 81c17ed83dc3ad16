"""Training steps of the user's own. They may read gradients, once `synchronize()` has put copies of
the pipeline's into ``.grad``; whatever else they do to ``.grad`` is refused, because the update
would not see it."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Trainer

from roundpipe.errors import ConfigError

from ..arguments import HOST, losses_on
from ..engine.watchers import Shown, has_own
from .window import AccumulationWindow

_GRADIENT = cast(Any, torch.Tensor.grad)  # a property of torch's own
_READ, _SET, _DELETE = _GRADIENT.__get__, _GRADIENT.__set__, _GRADIENT.__delete__
_PIPELINE = ("roundpipe.", "roundpipe_hf.")
_INSTEAD = (
    "clip with max_grad_norm, and change gradients in the step of an optimizer of your own, see "
    "optimizer_cls_and_kwargs"
)


def as_own_step(
    trainer: Trainer, window: AccumulationWindow, training_step: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A step that is not our mixin's, whose loss may be that of an engine call and so in host
    memory: Trainer adds up losses on the device that it takes for the model's."""
    # Not those that generate, because it slows every operation.
    is_watched = has_own(trainer, "training_step")

    @functools.wraps(training_step)
    def call(*inputs: Any, **kwargs: Any) -> torch.Tensor:
        with losses_on(HOST), contextlib.ExitStack() as watching:
            watched = _WatchedGradients(trainer, window) if is_watched else None
            if watched is not None:
                watching.enter_context(watched)
            loss = training_step(*inputs, **kwargs)
        if watched is not None:
            watched.refuse_what_the_update_would_not_see()
        return loss.to(trainer.args.device)

    return call


class _WatchedGradients(TorchFunctionMode):
    """Sees who reads and who sets ``.grad`` of the model's parameters.

    The rule: when a step returns, each ``.grad`` is None or the copy that the pipeline has put
    there, as it was put there. A backward past the pipeline, and a write through ``.data``, do not
    come by here, so all are looked at in the end.
    """

    def __init__(self, trainer: Any, window: AccumulationWindow) -> None:
        super().__init__()
        self._trainer, self._window = trainer, window
        named = trainer.model.named_parameters()
        self._names: dict[torch.Tensor, str] = {
            weight: name for name, weight in named if weight.requires_grad
        }
        self._shown: dict[torch.Tensor, Shown] = {}
        self._seen_none_at: bool | None = None  # of whether a round has left gradients
        self._note_all()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            self._seen_none_at = None
        elif func in (_READ, _SET, _DELETE) and args[0] in self._names:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            is_ours = f"{caller}.".startswith(_PIPELINE)
            if is_ours and func == _SET:
                return self._put(args[0], args[1])
            if not is_ours and func == _READ:
                self._is_read(args[0])
            elif not is_ours:
                self._is_set(args[0], args[1] if func == _SET else None)
        return func(*args, **(kwargs or {}))

    def refuse_what_the_update_would_not_see(self) -> None:
        """Raises for the first gradient that the pipeline has not put there, or that was changed
        since."""
        for parameter, name in self._names.items():
            known = self._shown.get(parameter)
            if parameter.grad is None:
                continue
            if known is None or parameter.grad is not known.gradient:
                raise ConfigError(
                    f"training_step left a gradient in the model's own {name!r} that did not come "
                    "through the pipeline, whose update would not see it. A training_step has to "
                    "call the model it is given, not self.model; penalties on weights belong in "
                    "compute_loss, under the training_step of RoundPipeTrainer"
                )
            self._refuse_written(known)

    def _put(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """The pipeline sets what somebody will see, or puts it aside for a moment, or drops it."""
        known, before = self._shown.get(parameter), parameter.grad
        parameter.grad = gradient
        if gradient is None or (known is not None and gradient is known.gradient):
            return
        if before is not None and known is not None:
            self._refuse_written(known)
        self._shown[parameter] = Shown.of(parameter)

    def _note_all(self) -> None:
        for parameter in self._names:
            if parameter.grad is not None:
                self._shown[parameter] = Shown.of(cast(nn.Parameter, parameter))

    def _is_read(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None and self._has_waiting(parameter):
            raise ConfigError(
                f"training_step reads the gradient of {self._names[parameter]!r} before it is "
                "there: the pipeline keeps gradients. Call self.synchronize() after the backward, "
                f"which puts copies into .grad; {_INSTEAD}"
            )

    def _is_set(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        before = parameter.grad
        if gradient is before and before is not None:
            return  # as `p.grad *= 2` does, whose change is seen in the end
        if gradient is not None:
            raise ConfigError(
                f"training_step sets the gradient of {self._names[parameter]!r}, but the pipeline "
                f"keeps gradients, and its update would not see this one: {_INSTEAD}"
            )
        if before is not None or self._has_waiting(parameter):
            raise ConfigError(
                f"training_step drops the gradient of {self._names[parameter]!r}, but the pipeline "
                "keeps gradients, and its update would see it all the same: call zero_grad() of "
                "the model that the step is given, which drops all of them; to leave one out of "
                "the update, set its requires_grad before the run"
            )

    def _has_waiting(self, parameter: nn.Parameter) -> bool:
        """Whether the pipeline has a gradient for it that ``.grad`` does not show yet."""
        has_run = self._window.has_run
        if self._seen_none_at == has_run:
            return False  # because for each of many parameters, waiting would take seconds
        self._trainer.synchronize()
        self._seen_none_at = has_run
        self._note_all()
        return parameter.grad is not None

    def _refuse_written(self, known: Shown) -> None:
        if known.was_written():
            raise ConfigError(
                f"training_step changed the gradient of {self._names[known.parameter]!r}, which is "
                f"a copy of the pipeline's: {_INSTEAD}"
            )
