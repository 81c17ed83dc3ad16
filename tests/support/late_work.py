"""A layer whose backward waits, for tests of what the caller does after a call has returned and
before its late part.

The late part of `forward_backward` are the backward stage runs after the fused one. `LATE` makes
two of them, of which the first pauses; the layers below are recomputed after it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan
from tests.support.models import MLP_WIDTH
from tests.support.optimizers import Gate

LATE = ModelExecutePlan(
    fwd_plan=[range(3), range(3, 4)],
    bwd_plan=[range(4, 5), range(3, 4), range(3)],
)


class _PausingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Gate) -> Tensor:
        ctx.gate = gate
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.gate.pause()
        return gradient, None


class PausingBackward(nn.Module):
    """The identity; its gradient comes once the gate is open."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, hidden: Tensor) -> Tensor:
        paused: Tensor = _PausingBackward.apply(hidden, self.gate)
        return paused


def open_gate() -> Gate:
    """For the oracle, which pauses nowhere."""
    gate = Gate()
    gate.open()
    return gate


def make_pausing(gate: Gate, *others: nn.Module) -> nn.Sequential:
    """Five layers as `LATE` wants them; ``others`` replace the second and the third. Made alike
    every time."""
    torch.manual_seed(0)
    first, last = nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH)
    second, third = others or (nn.BatchNorm1d(MLP_WIDTH), nn.Tanh())
    return nn.Sequential(first, second, third, PausingBackward(gate), last)
