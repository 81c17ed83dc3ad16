"""Lion: steps by the sign of a momentum, whose only state is that momentum (Chen et al. 2023,
algorithm 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.updates import Decision, Tensors
from ..memory.scratch import scratch
from ..params.window import Master
from .optimizers import OnePass, decision_of_whole
from .state import has_complex


@dataclass(frozen=True)
class LionRule:
    """Lion with these hyper-parameters."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool

    def apply(self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors]) -> None:
        for weight, gradient, [momentum] in zip(weights, gradients, moments, strict=True):
            self.apply_to(weight, gradient, momentum)

    def apply_to(self, weight: Tensor, gradient: Tensor, momentum: Tensor) -> None:
        """w *= 1 - lr * decay;  w -= lr * sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 -
        beta2) * g"""
        sign = -1.0 if self.maximize else 1.0
        direction = scratch("lion", gradient.numel()).view_as(gradient)
        torch.mul(momentum, self.beta1, out=direction).add_(
            gradient, alpha=sign * (1 - self.beta1)
        ).sign_()
        weight.mul_(1 - self.lr * self.weight_decay).sub_(direction, alpha=self.lr)
        momentum.mul_(self.beta2).add_(gradient, alpha=sign * (1 - self.beta2))

    def formula(self) -> None:
        """The one-pass kernel has no such rule."""


class _PlainLion(torch.optim.Optimizer):
    """The same on ``.grad``, for masters that the one pass does not take."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        fused: bool = True,
    ) -> None:
        if lr < 0:
            raise ConfigError(f"lr is {lr}; it must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas are {betas}; each must be at least 0 and less than 1")
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)
        if any(has_complex(group) for group in self.param_groups):
            raise ConfigError(
                "Lion has a complex parameter, which has no sign to step by; give it to another "
                "optimizer, such as roundpipe.optim.AdamW"
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates every parameter that has a ``grad``, in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad.to(parameter.dtype)
                    _rule_of(group).apply_to(parameter, gradient, self._momentum(parameter))
        return loss

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            memory = getattr(parameter, "memory", Master.memory)
            made = memory.zeros(parameter.shape, parameter.dtype)
            state["exp_avg"] = made.to(parameter.device)
        momentum: torch.Tensor = state["exp_avg"]
        return momentum


class Lion(OnePass, _PlainLion):
    """Lion (Chen et al. 2023, algorithm 2), which steps by the sign of a momentum.

    Its state is that momentum, in the master's dtype and shape: 4 bytes per element in fp32.

    Args:
        params: masters, or param groups of such, from ``optim_parameters()``.
        lr: the size of every element's step; a third to a tenth of what AdamW takes.
        betas: of the step's direction and of the momentum.
        weight_decay: decoupled, times ``lr``; as many times more than AdamW's as ``lr`` is less.
        maximize: climb instead.
        fused: read gradients as they were offloaded; False reads ``.grad``.

    Raises:
        ConfigError: a negative ``lr``, or ``betas`` outside of 0 to 1.

    Example:
        >>> optimizer = roundpipe.optim.Lion(engine.optim_parameters(), lr=3e-5, weight_decay=0.1)
    """

    def decisions(self, masters: Sequence[Master], group: dict[str, Any]) -> list[Decision]:
        rule = _rule_of(group)
        return [decision_of_whole(master, (self._momentum(master),), rule) for master in masters]


def _rule_of(group: dict[str, Any]) -> LionRule:
    beta1, beta2 = group["betas"]
    return LionRule(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
    )
