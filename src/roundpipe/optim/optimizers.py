"""Drop-in optimizers for masters on the host, which read gradients as they landed and update in one pass."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..params.copies import Master
from . import context
from .native import Formula
from .state import SteadyState
from .updates import Rule, RuleUpdate, record, update_of

_ADAM, _ADAM_AMSGRAD, _SGD, _SGD_MOMENTUM = range(4)  # as update.c numbers them


class OnePass(SteadyState, torch.optim.Optimizer):
    """Steps by rules where it can, else as torch does. To be named before a class of ``torch.optim``.

    ``step`` only decides; see [Note: pending updates] in params/pending.py.
    """

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **_fused_by_default(kwargs))
        context.introduce(self)

    def update(self, master: Master, group: dict[str, Any]) -> RuleUpdate:
        """What this step does to a master that has a gradient. Makes the master's state on first use."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                master.grad = None  # without reading it first, which would make it

    def step(self, closure: Any = None) -> Any:
        if not self._has_rules():
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for master in group["params"]:
                if master.landed():
                    record(self.update(master, group))
        return loss

    def _has_rules(self) -> bool:
        return all(
            group["fused"]
            and not group.get("capturable")
            and all(isinstance(p, Master) and p.dtype is torch.float32 for p in group["params"])
            for group in self.param_groups
        )


@dataclass(frozen=True)
class AdamRule:
    """Adam and AdamW at one step. ``step`` counts from 1."""

    step: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    is_decoupled: bool

    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        mean, square, *largest = moments
        kernel = torch._fused_adamw_ if self.is_decoupled else torch._fused_adam_
        kernel(
            [weight],
            [gradient],
            [mean],
            [square],
            largest,
            [torch.tensor(self.step)],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )

    def formula(self) -> Formula:
        correction1, correction2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        return Formula(
            rule=_ADAM_AMSGRAD if self.amsgrad else _ADAM,
            coefficients=(
                1 - self.beta1,
                self.beta2,
                1 - self.beta2,
                math.sqrt(correction2),
                self.eps,
                -self.lr / correction1,
            ),
            sign=-1.0 if self.maximize else 1.0,
            coupled_decay=0.0 if self.is_decoupled else self.weight_decay,
            decay=1 - self.lr * self.weight_decay if self.is_decoupled else 1.0,
        )


class _AdamFamily(OnePass):
    def update(self, master: Master, group: dict[str, Any]) -> RuleUpdate:
        state = self.state[master]
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in names:
                state[name] = torch.zeros_like(master.data)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rule = AdamRule(
            step=float(state["step"]),
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            is_decoupled=group["decoupled_weight_decay"],
        )
        return update_of(master, tuple(state[name] for name in names), rule)


@dataclass(frozen=True)
class SGDRule:
    """Stochastic gradient descent. ``is_first``: the velocity is not there yet and becomes the gradient."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first: bool

    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        torch._fused_sgd_(
            [weight],
            [gradient],
            list(moments),
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=self.is_first,
        )

    def formula(self) -> Formula:
        return Formula(
            rule=_SGD if self.momentum == 0 else _SGD_MOMENTUM,
            coefficients=(self.momentum, 1 - self.dampening, self.is_first, self.nesterov, -self.lr),
            sign=-1.0 if self.maximize else 1.0,
            coupled_decay=self.weight_decay,
        )


class SGD(OnePass, torch.optim.SGD):
    """``torch.optim.SGD``, same arguments and state. Construct it over ``optim_parameters()``."""

    def update(self, master: Master, group: dict[str, Any]) -> RuleUpdate:
        momentum = float(group["momentum"])
        state = self.state[master] if momentum else {}
        is_first = momentum != 0 and state.get("momentum_buffer") is None
        if is_first:
            state["momentum_buffer"] = torch.empty_like(master.data)
        rule: Rule = SGDRule(
            lr=float(group["lr"]),
            momentum=momentum,
            dampening=group["dampening"],
            weight_decay=float(group["weight_decay"]),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first=is_first,
        )
        return update_of(master, (state["momentum_buffer"],) if momentum else (), rule)


class Adam(_AdamFamily, torch.optim.Adam):
    """``torch.optim.Adam``, same arguments and state. Construct it over ``optim_parameters()``."""


class AdamW(_AdamFamily, torch.optim.AdamW):
    """``torch.optim.AdamW``, same arguments and state. Construct it over ``optim_parameters()``."""


def _fused_by_default(kwargs: dict[str, Any]) -> dict[str, Any]:
    chosen = any(kwargs.get(name) for name in ("foreach", "differentiable", "capturable"))
    return kwargs if chosen else {"fused": True, **kwargs}
