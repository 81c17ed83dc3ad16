"""Hyper-parameters as they were when ``step`` was called, whatever a scheduler does to them
meanwhile.

torch tells of every optimizer step through a global pre-hook, which may also replace the arguments
of that step, ``self`` included. So each step inside ``step_fn`` runs on a *stand-in*: the same
state and the same parameters, with param groups of its own. The optimizer's own groups belong to
the caller's thread alone and are never written late.

Nothing of torch's tells that an optimizer was made, which has to be known before its first step is
called: so its ``add_param_group`` is wrapped, which every optimizer goes through that has masters.
"""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import ConfigError
from ..params.placement.newest import PendingUpdates
from ..params.ranks import Ranks
from ..params.window import Master
from ..threads.weak_registry import WeakRegistry
from . import context
from .state_pages import StatePages

_log = logging.getLogger("roundpipe")
Hyperparameters = list[dict[str, Any]]
_BEFORE = "_roundpipe_before"  # a stand-in's groups as they were before its step

_masters: "weakref.WeakValueDictionary[int, torch.Tensor]" = weakref.WeakValueDictionary()
_working: "WeakRegistry[WorkingWeights]" = WeakRegistry()


class Taken(NamedTuple):
    """Hyper-parameters as they were at a call. ``optimizer``: whose, because another may have its
    id by now."""

    optimizer: weakref.ref[Optimizer]
    groups: Hyperparameters


class LearntOptimizers:
    """The optimizers over an engine's masters. Changed where they are made or stepped, read by the
    caller. ``pages``: those of state on a disk."""

    def __init__(self, pages: StatePages | None = None) -> None:
        self.pages = pages
        self._known: dict[int, weakref.ref[Optimizer]] = {}
        self.self_written: dict[int, set[str]] = {}
        self.have_stepped = False

    def learn(self, optimizer: Optimizer) -> None:
        known = self._known.get(id(optimizer))
        if known is None or known() is not optimizer:
            self.self_written.pop(id(optimizer), None)  # of one that is gone and had this id
            self._known[id(optimizer)] = weakref.ref(optimizer)

    def forget_gone(self) -> bool:
        """Whether none is known, or one is gone: another may have taken its place that nobody has
        seen step."""
        gone = [key for key, reference in list(self._known.items()) if reference() is None]
        for key in gone:
            del self._known[key]
            self.self_written.pop(key, None)
        return bool(gone) or not self._known

    def snapshot(self) -> dict[int, Taken]:
        """Copies of all groups' hyper-parameters now, for a step that is called."""
        taken = {}
        for key, reference in list(self._known.items()):
            optimizer = reference()
            if optimizer is None:
                del self._known[key]
            else:
                taken[key] = Taken(reference, _hyperparameters(optimizer))
                # Because a scheduler asks whether it was stepped, and may before the update runs.
                optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's own
        return taken


class StepOptimizers:
    """What one ``step_fn`` may step, and with which hyper-parameters. ``on_enter`` is told when a
    step begins.

    ``updates`` are those decided in it and not computed yet; set by the optimizer thread.
    ``ranks``: those that step together.
    """

    updates: PendingUpdates
    ranks: Ranks

    def __init__(
        self, learnt: LearntOptimizers, taken: dict[int, Taken], on_enter: Callable[[], None]
    ) -> None:
        self._on_enter = on_enter
        self._learnt = learnt
        self._taken = taken
        self._stepped: list[Optimizer] = []

    def watching(self) -> AbstractContextManager[Any]:
        """A context for ``step_fn``, in which state on a disk is read as it is passed."""
        return nullcontext() if self._learnt.pages is None else self._learnt.pages.watching()

    def end(self, step_fn: Callable[..., Any]) -> None:
        """``step_fn`` has returned. If it is an optimizer's own ``step``, which had nobody to drop
        the gradients it used, they are dropped here."""
        for optimizer in self._stepped:
            if optimizer.step == step_fn:
                optimizer.zero_grad()
        if self._stepped and not self._learnt.have_stepped:
            self._learnt.have_stepped = True
            for optimizer in self._stepped:
                _tell_what_is_left(optimizer)

    def stand_in(self, optimizer: Optimizer) -> Optimizer:
        self._stepped.append(optimizer)
        self._learnt.learn(optimizer)
        if self._learnt.pages is not None:
            self._learnt.pages.begin_step(optimizer)
        then = self._taken.get(id(optimizer))
        if then is not None and then.optimizer() is optimizer:
            taken = then.groups
        else:
            taken = _hyperparameters(optimizer)
        self._on_enter()
        own = self._learnt.self_written.get(id(optimizer), set())
        other = object.__new__(type(optimizer))
        other.__dict__.update(optimizer.__dict__)
        other.param_groups = [
            {
                **hypers,
                **{name: group[name] for name in own if name in group},
                "params": group["params"],
            }
            for hypers, group in zip(taken, optimizer.param_groups, strict=False)
        ]
        other.__dict__[_BEFORE] = (
            [dict(group) for group in other.param_groups],
            dict(optimizer.__dict__),
        )
        return other

    def take_back(self, optimizer: Optimizer, other: Optimizer) -> None:
        """What the step itself wrote (counters in its groups, attributes) goes to the caller's
        optimizer."""
        before, attributes = other.__dict__.pop(_BEFORE)
        own = self._learnt.self_written.setdefault(id(optimizer), set())
        for group, stepped, old in zip(
            optimizer.param_groups, other.param_groups, before, strict=False
        ):
            for name, value in stepped.items():
                if name != "params" and (name not in old or old[name] is not value):
                    own.add(name)
                    group[name] = value
        for name, value in other.__dict__.items():
            if name != "param_groups" and attributes.get(name) is not value:
                optimizer.__dict__[name] = value


def _tell_what_is_left(optimizer: Optimizer) -> None:
    """Warns of gradients that were used and that the next step will use again."""
    parameters = context.parameters_of(optimizer)
    if any(
        bool(part.any())
        for parameter in parameters
        if isinstance(parameter, Master)
        for part in parameter.offloaded()
    ):
        _log.warning(
            "step_fn stepped %s and left its gradients, so the next step adds its own to them, as "
            "torch does; call zero_grad() in step_fn, after step(), unless that is meant",
            type(optimizer).__name__,
        )


def _hyperparameters(optimizer: Optimizer) -> Hyperparameters:
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def know_master(master: torch.Tensor) -> None:
    _masters[id(master)] = master


class WorkingWeights:
    """Parameters that get no gradient, for as long as an engine that trains their masters holds
    this and is open. Other engines may have the same.

    Does not hold them: its owner does.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.is_closed = False
        self.ids = frozenset(map(id, parameters))
        _working.add(self)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    step = context.current_step()
    if step is not None and _BEFORE in optimizer.__dict__:
        return None  # a stand-in already: its step calls the step of the class above
    parameters = context.parameters_of(optimizer)
    working = set[int]().union(*(weights.ids for weights in _working if not weights.is_closed))
    for parameter in parameters:
        if not isinstance(parameter, Master) and id(parameter) in working:
            raise ConfigError(
                f"this {type(optimizer).__name__} was made over the model's working weights, which "
                "get no gradient; make it over RoundPipe.optim_parameters(), or close() the engine "
                "to train the model without it"
            )
    if step is not None:
        masters = [parameter for parameter in parameters if isinstance(parameter, Master)]
        if masters and not any(master.is_in_step for master in masters):
            raise ConfigError(
                f"this {type(optimizer).__name__} was made over another engine's copies of the "
                "weights, which get no gradient in this step; make it again over "
                "optim_parameters() of the engine whose step() was called"
            )
        return (step.stand_in(optimizer), *args[1:]), kwargs
    for parameter in parameters:
        if _masters.get(id(parameter)) is parameter:
            raise ConfigError(
                f"{type(optimizer).__name__}.step() was called outside step_fn, where there is no "
                "gradient; call RoundPipe.step(lambda: optimizer.step())"
            )
    return None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    step = context.current_step()
    if step is not None and args and args[0] is not optimizer:
        step.take_back(optimizer, args[0])


_hooked = False


def hook_optimizers() -> None:
    """Installs the hooks, once per process."""
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        kind: Any = Optimizer
        kind.add_param_group = _introducing(kind.add_param_group)


def _introducing(add_param_group: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_param_group)
    def added(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        add_param_group(optimizer, *args, **kwargs)
        context.introduce(optimizer, optimizer.param_groups[-1]["params"])

    return added
