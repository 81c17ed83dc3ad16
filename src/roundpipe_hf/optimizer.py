"""The optimizer Trainer sees: its `step` hands the update to the engine. Knows nothing of Trainer.

Trainer calls `optimizer.step()` inline, right after it asked for the gradient norm and right before the scheduler and
`model.zero_grad()`. The gradients and the masters belong to the engine, so clipping, the norm and the inner
optimizer's step all run in the engine's `step`; the norm is therefore a promise until somebody reads it.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from roundpipe import RoundPipe, StepHandle, clip_grad_norm_
from roundpipe.errors import ConfigError
from roundpipe.optim import Adam, AdamW

# torch's class -> RoundPipe's of the same arguments, state and kernel, which reads gradients as they landed.
SAME_BUT_FASTER: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
}


class PipelineOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the engine's masters, stepped by the engine.

    Shares the inner optimizer's parameter groups: a scheduler's writes are the inner's. The engine reads them at the
    call of ``step``, so that a scheduler may go on while the update runs.
    """

    def __init__(self, engine: RoundPipe, inner: torch.optim.Optimizer, *, is_async: bool) -> None:
        # No super().__init__(): everything it would set up is the inner optimizer's and read through below.
        self.inner = inner
        self.engine = engine
        self.max_grad_norm = 0.0
        self._is_async = is_async
        self._last: StepHandle | None = None

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # returns no loss
        """Hands the update to the engine.

        Called on the user's thread. Synchronous: waits for the update and writes it into the model. Asynchronous:
        returns at once; errors of the update come up at the next engine call.
        """
        if closure is not None:
            raise ConfigError("step(closure): the pipeline cannot evaluate the model again within a step")
        self._last = self.engine.step(self._update, self._is_async, self.max_grad_norm)
        if not self._is_async:
            self.engine.synchronize()  # because callbacks read the model itself right after this

    def _update(self, max_grad_norm: float) -> float:
        """Runs on the optimizer thread. Returns the norm before clipping."""
        limit = max_grad_norm if max_grad_norm > 0 else math.inf
        norm = clip_grad_norm_(self.engine, limit)
        self.inner.step()
        return float(norm)

    def last_grad_norm(self) -> float:
        """The norm of the last step's gradients before clipping. Waits for that step."""
        assert self._last is not None, "no step was taken yet"
        norm: float = self._last.result()
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients not stepped yet."""
        self.engine.zero_grad()

    def wait(self) -> None:
        """Waits for the update in flight, if there is one."""
        if self._last is not None:
            self._last.wait()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, so that a plain Trainer can load it."""
        self.wait()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait()
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.wait()
        self.inner.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # a plain attribute in torch
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __repr__(self) -> str:
        return f"PipelineOptimizer({self.inner!r})"


class PendingNorm:
    """A gradient norm that is known once the step is done; reading it waits, like a tensor on a device."""

    def __init__(self, optimizer: PipelineOptimizer) -> None:
        self._optimizer = optimizer

    def item(self) -> float:
        return self._optimizer.last_grad_norm()


def adopt(optimizer: torch.optim.Optimizer, engine: RoundPipe, *, is_async: bool) -> torch.optim.Optimizer:
    """Takes an optimizer somebody else made, if it is over the engine's masters; anything else would train nothing."""
    made = unwrapped(optimizer)
    if isinstance(made, PipelineOptimizer) and made.engine is engine:
        return optimizer
    masters = {id(master) for _, master in engine.optim_named_parameters()}
    is_over_masters = all(id(parameter) in masters for parameter in _parameters_of(optimizer))
    if is_over_masters and not isinstance(made, PipelineOptimizer):
        return PipelineOptimizer(engine, optimizer, is_async=is_async)
    raise ConfigError(
        f"this {type(optimizer).__name__} is not over the pipeline's own copies of the weights and would train "
        "nothing. Pass optimizer_cls_and_kwargs=(cls, kwargs), or override create_optimizer and make it over "
        "self.optim_named_parameters()"
    )


def unwrapped(optimizer: Any) -> Any:
    """What `accelerator.prepare` wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
