"""The optimizer Trainer sees: its `step` hands the update to the engine. Knows nothing of Trainer.

Trainer calls `optimizer.step()` inline, right after it asked for the gradient norm and right before
the scheduler and `model.zero_grad()`. The gradients and the masters belong to the engine, so
clipping, the norm and the inner optimizer's step all run in the engine's `step`; the norm is
therefore a promise until somebody reads it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import GradScaler, OptimizerCtx, RoundPipe, StepHandle, clip_grad_norm_
from roundpipe.errors import ConfigError
from roundpipe.optim import SGD, Adam, AdamW
from roundpipe.optim.state import gathered_state_dict, of_owned
from roundpipe.step.context import introduce, parameters_of

# torch's class -> RoundPipe's of the same arguments, state and kernel, which reads gradients as
# they offloaded.
SAME_BUT_FASTER: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.Adam: Adam,
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
}


class StepOwner(Protocol):
    """Who has run what the step steps with."""

    def hand_over(self, optimizer: "PipelineOptimizer") -> StepHandle:
        """Calls ``optimizer.submit()``, once what it needs is there."""
        ...

    def stepped(self, optimizer: "PipelineOptimizer") -> None:
        """The update is the engine's now."""
        ...


class PipelineOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the engine's masters, stepped by the engine.

    Shares the inner optimizer's parameter groups: a scheduler's writes are the inner's. The engine
    reads them at the call of ``step``, so that a scheduler may go on while the update runs.

    Args:
        scaler: what the losses were multiplied with, for fp16. Only for a synchronous optimizer.
    """

    def __init__(
        self,
        engine: RoundPipe,
        inner: torch.optim.Optimizer,
        owner: StepOwner,
        *,
        is_async: bool,
        scaler: GradScaler | None = None,
    ) -> None:
        # No super().__init__(): everything it would set up is the inner optimizer's and read
        # through below.
        self.inner = inner
        self.engine = engine
        self.max_grad_norm = 0.0
        self.is_async = is_async
        self.was_skipped = False
        self.has_begun = False
        self._owner = owner
        self._scaler = scaler
        self._last: StepHandle | None = None
        self._gathered: dict[str, Any] | None = None
        # Listed once, because that walks through all modules of the model. They are the same for as
        # long as the engine is.
        self._masters = list(engine.optim_parameters())
        self._weights = list(engine.model.parameters())

    # Returns no loss.
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Hands the update to the engine.

        Called on the user's thread. Synchronous: waits for the update; the model has it after
        ``engine.synchronize()``. Asynchronous: returns at once; errors of the update come up at the
        next engine call.
        """
        if closure is not None:
            raise ConfigError(
                "step(closure): the pipeline cannot evaluate the model again within a step"
            )
        self._last = self._owner.hand_over(self)
        if self._scaler is not None:
            before = self._scaler.get_scale()
            self._scaler.update()
            self.was_skipped = self._scaler.get_scale() < before
        self._owner.stepped(self)

    def submit(self, penalties: Mapping[torch.Tensor, torch.Tensor]) -> StepHandle:
        """One try of the engine's step. ``has_begun`` tells whether masters may have changed if it
        raises.

        ``penalties``: gradients of weights of the model that did not come through the pipeline.
        """
        self.has_begun = False
        weights = self._weights if penalties else ()
        more = {weight: penalties[weight] for weight in weights if weight in penalties}
        if more:
            self.engine.add_gradients(more)
        return self.engine.step(self._update, self.is_async, self.max_grad_norm)

    def _update(self, max_grad_norm: float) -> float:
        """Runs on the optimizer thread. Returns the norm before clipping."""
        self.has_begun = True
        for master in self._masters:
            # The engine sums over processes, and Trainer means the mean over them.
            master.scale /= self.engine.ranks.count  # type: ignore[attr-defined]  # a `Master`
        if self._scaler is not None:
            self._scaler.unscale_(self.inner)
        norm = clip_grad_norm_(self.engine, max_grad_norm if max_grad_norm > 0 else math.inf)
        if self._scaler is not None:
            self._scaler.step(self.inner)
        else:
            self.inner.step()
        for master in self._masters:
            master.grad = None  # also where no optimizer has it
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

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, ``state_dict`` is that of all processes on the first one. They enter it
        together."""
        with OptimizerCtx():
            if self.engine.ranks.count > 1:
                self._gathered = gathered_state_dict(self.inner, self.engine.ranks)
        try:
            yield
        finally:
            self._gathered = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, so that a plain Trainer can load it."""
        self.wait()
        return self.inner.state_dict() if self._gathered is None else self._gathered

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.wait()
        self.inner.load_state_dict(of_owned(self.inner, state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.wait()
        self.inner.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        # A plain attribute in torch.
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
    """A gradient norm that is known once the step is done; reading it waits, like a tensor on a
    device."""

    def __init__(self, optimizer: PipelineOptimizer) -> None:
        self._optimizer = optimizer

    def item(self) -> float:
        return self._optimizer.last_grad_norm()


def is_over_masters(optimizer: torch.optim.Optimizer, engine: RoundPipe) -> bool:
    """Whether the optimizer was made over the engine's own copies of the weights."""
    masters = {id(master) for _, master in engine.optim_named_parameters()}
    return masters.issuperset(map(id, parameters_of(optimizer)))


def why_not_moved(optimizer: torch.optim.Optimizer, model: nn.Module) -> str | None:
    """Says what keeps an optimizer over the model's own parameters from being moved to the engine's
    copies of them; None if nothing does."""
    kind, own = type(optimizer).__name__, {id(parameter) for parameter in model.parameters()}
    if not own.issuperset(map(id, parameters_of(optimizer))):
        return f"this {kind} is over tensors that are no parameters of the model"
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
        return f"this {kind} has been stepped, and what it keeps belongs to the model's parameters"
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state") and any(
            id(leaf) in own or isinstance(leaf, torch.optim.Optimizer)
            for leaf in pytree.tree_leaves(value)
        ):
            return f"this {kind} keeps the model's parameters in .{name} as well"
    return None


def _move_to_masters(optimizer: torch.optim.Optimizer, engine: RoundPipe) -> None:
    """Replaces the model's parameters in the optimizer's groups by the engine's copies; frozen ones
    have none and are left out, but where the group has a list of something for each, as that of
    LoRA-FA has. It stays the same object, because a scheduler may hold it."""
    masters = dict(engine.optim_named_parameters())
    copies = {
        id(parameter): masters[name]
        for name, parameter in engine.model.named_parameters()
        if name in masters
    }
    for group in optimizer.param_groups:
        group.pop("param_names", None)  # because some are left out
        listed = [value for name, value in group.items() if name != "params"]
        count = len(group["params"])
        has_lists = any(isinstance(value, list) and len(value) == count for value in listed)
        group["params"] = [
            copies[id(p)] if id(p) in copies else p.detach()
            for p in group["params"]
            if has_lists or id(p) in copies
        ]
    states = {parameter: optimizer.state.pop(parameter) for parameter in list(optimizer.state)}
    for parameter, state in states.items():
        master = copies.get(id(parameter))
        if master is not None:
            optimizer.state[master] = {
                name: value.to(master.dtype)
                if isinstance(value, torch.Tensor) and value.shape == master.shape
                else value
                for name, value in state.items()
            }
    introduce(optimizer, masters.values())


def adopted(optimizer: torch.optim.Optimizer, engine: RoundPipe) -> torch.optim.Optimizer | None:
    """The optimizer somebody else made, to be stepped by the engine; None if it is the engine's
    already.

    Raises:
        ConfigError: it is over other tensors and would train nothing.
    """
    made = unwrapped(optimizer)
    if isinstance(made, PipelineOptimizer) and made.engine is engine:
        return None
    if not isinstance(made, PipelineOptimizer):
        if is_over_masters(optimizer, engine):
            return optimizer
        if why_not_moved(optimizer, engine.model) is None:
            _move_to_masters(optimizer, engine)
            return optimizer
    raise ConfigError(
        f"this {type(optimizer).__name__} is not over the pipeline's own copies of the weights and "
        "would train nothing. Pass optimizer_cls_and_kwargs=(cls, kwargs), or override "
        "create_optimizer and make it over self.optim_named_parameters()"
    )


def unwrapped(optimizer: Any) -> Any:
    """What `accelerator.prepare` wrapped."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
