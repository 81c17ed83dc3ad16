"""Where optimizer code is allowed to run, and what it sees there. Thread-local: other threads are
not affected."""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import ConfigError
from ..threads.weak_registry import WeakRegistry
from ..threads.worker import in_worker

if TYPE_CHECKING:
    from .handle import StepHandle
    from .hyperparameters import StepOptimizers
    from .thread import StepThread


class StepListener(Protocol):
    """What has settings of its own to remember when ``RoundPipe.step`` is called. Called on the
    caller's thread."""

    def step_called(self, step: "StepOptimizers", handle: "StepHandle", is_async: bool) -> None: ...


_threads: "WeakRegistry[StepThread]" = WeakRegistry()
_listeners: WeakRegistry[StepListener] = WeakRegistry()


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.step: StepOptimizers | None = None


_local = _Local()


class OptimizerCtx:
    """Inside, ``parameters()`` of every engine give the masters, in this thread only.

    Entering it outside ``step_fn`` waits for all pending steps. A layer or ``loss_fn`` cannot enter
    it: that is a ConfigError.

    Example:
        >>> with roundpipe.OptimizerCtx():
        ...     norms = {name: master.norm() for name, master in engine.named_parameters()}
    """

    def __enter__(self) -> "OptimizerCtx":
        if _local.step is None:
            if in_worker():
                raise ConfigError(
                    "OptimizerCtx was entered inside a layer or loss_fn; enter it in your own "
                    "thread"
                )
            for thread in _threads:
                thread.wait_idle()
        _local.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        _local.depth -= 1


def sees_masters() -> bool:
    """Whether this thread is in an optimizer context."""
    return _local.depth > 0


def current_step() -> "StepOptimizers | None":
    """The step that this thread runs, if it is inside a ``step_fn``."""
    return _local.step


def refuse_inside(what: str) -> None:
    """Raises ConfigError in a ``step_fn``, layer or ``loss_fn``: waiting there for the engine would
    wait for itself."""
    if _local.step is not None:
        raise ConfigError(f"{what} was called inside step_fn; call it after step() returns")
    if in_worker():
        raise ConfigError(
            f"{what} was called inside a layer or loss_fn; call it after forward_backward() returns"
        )


@contextmanager
def running_step(optimizers: "StepOptimizers") -> Iterator[None]:
    """The calling thread is the optimizer thread running a ``step_fn``."""
    _local.step = optimizers
    _local.depth += 1
    try:
        with torch.enable_grad(), optimizers.watching():
            yield
    finally:
        _local.step = None
        _local.depth -= 1


def introduce(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Makes an optimizer known to the engines whose masters are among its ``parameters``, so that
    its first step is snapshotted too."""
    for thread in _threads:
        thread.introduce(optimizer, parameters)


def register(thread: "StepThread") -> None:
    _threads.add(thread)


def threads() -> "Iterator[StepThread]":
    """Those of all engines that there are."""
    return iter(_threads)


# Because none of them runs there, so that whoever waited would wait forever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)


def listen(listener: StepListener) -> None:
    """From now on the listener, while it lives, is told of each step before it is queued."""
    _listeners.add(listener)


def tell_called(step: "StepOptimizers", handle: "StepHandle", is_async: bool) -> None:
    for listener in _listeners:
        listener.step_called(step, handle, is_async)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Yields what ``optimizer`` is over, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
