"""An optimizer of one's own, twice: as any in torch, and as an update rule of this project.

`SignMomentum` is plain torch. It works in `step_fn` like any `torch.optim.Optimizer`: each master's
`grad` is made when it is read, in the master's dtype, which takes that many bytes meanwhile.

`OnePassSignMomentum` has the same arguments and numbers. It says what happens to each element, and
leaves it to the engine to do so chunk by chunk: gradients are read as they were offloaded, and a
layer's weights go up again as soon as that layer is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, virtual
from roundpipe.kernels.updates import Decision  # internal, as the next: may change
from roundpipe.optim.optimizers import OnePass


class SignMomentum(torch.optim.Optimizer):
    """Steps by the sign of a momentum (Bernstein et al. 2018). `OnePass` reads ``fused``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.9, *, fused: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "fused": fused})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    _rule_of(group).apply([weight], [weight.grad], [[self.velocity(weight)]])

    def velocity(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "velocity" not in state:
            state["velocity"] = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        return state["velocity"]


@dataclass(frozen=True)
class SignRule:
    """Must be elementwise: it is given flat chunks of a weight, its gradient and its state."""

    lr: float
    momentum: float

    def apply(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
    ) -> None:
        for weight, gradient, [velocity] in zip(weights, gradients, moments, strict=True):
            velocity.mul_(self.momentum).add_(gradient, alpha=1 - self.momentum)
            weight.sub_(velocity.sign(), alpha=self.lr)

    def formula(self) -> None:
        """The compiled kernel has no such rule; torch's operations above are used."""


class OnePassSignMomentum(OnePass, SignMomentum):
    """`SignMomentum` over masters, by its rule."""

    def decisions(self, masters: Sequence[Any], group: dict[str, Any]) -> list[Decision]:
        rule = _rule_of(group)
        return [Decision(master, (self.velocity(master),), rule) for master in masters]


def _rule_of(group: dict[str, Any]) -> SignRule:
    return SignRule(lr=float(group["lr"]), momentum=group["momentum"])


def train(model: nn.Module, batches: Any, kind: type[SignMomentum]) -> None:
    with RoundPipe(model, devices=virtual(2)) as engine:
        optimizer = kind(engine.optim_parameters(), lr=1e-2)
        for inputs, targets in batches:
            # Losses of microbatches are added up.
            engine.forward_backward((inputs,), label=targets, loss_fn=nn.MSELoss(reduction="sum"))
            engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)


if __name__ == "__main__":
    for kind in (SignMomentum, OnePassSignMomentum):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        train(model, [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(3)], kind)
        print(f"{kind.__name__}: {model[2].bias.item():.6f}")
