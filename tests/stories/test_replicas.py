"""Devices computed with the user's own weights, or wrote over what somebody else still had to read.

On a device a layer is a replica whose weights lie in a slot that other layers use next. Modules
kept in a plain list or dictionary were not replicated: the user's originals ran, nothing was
trained and gradients leaked into the user's `.grad`. A layer that returned its own weight handed on
a slot which then held another layer's. And `nn.Identity` handed on its very input, so that an
in-place layer after it wrote over what the recompute starts from.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import Reference, plain_call

BATCH = mlp_batch(rows=6)


def stages(*forward: range, backward: list[range]) -> ModelExecutePlan:
    return ModelExecutePlan(fwd_plan=list(forward), bwd_plan=backward)


ONE_LAYER_EACH = stages(range(1), range(1, 2), backward=[range(2, 3), range(1, 2), range(1)])


class Held(nn.Module):
    """Uses its modules and parameters by way of whatever ``hold`` puts them into."""

    def __init__(self, hold: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.second = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.scale = nn.Parameter(torch.ones(MLP_WIDTH))
        self.held = hold(self.first, self.second, self.scale)

    def forward(self, hidden: Tensor) -> Tensor:
        first, second, scale = self._find(self.held)
        return second(first(hidden).tanh()) * scale

    def _find(self, held: Any) -> list[Any]:
        if isinstance(held, (nn.Module, Tensor)):
            return [held]
        values = held.values() if isinstance(held, dict) else held
        return [found for value in values for found in self._find(value)]


@pytest.mark.parametrize(
    "hold",
    [
        pytest.param(lambda first, second, scale: [first, second, scale], id="list"),
        pytest.param(lambda first, second, scale: (first, second, scale), id="tuple"),
        pytest.param(lambda first, second, scale: {"a": first, "b": second, "c": scale}, id="dict"),
        pytest.param(
            lambda first, second, scale: [{"stack": [first, second]}, ({"w": scale},)], id="nested"
        ),
    ],
)
def test_what_is_kept_in_plain_containers_is_trained(
    hold: Callable[[Any, Any, Any], Any], devices: DeviceSet, engines: Engines
) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    torch.manual_seed(0)
    model = nn.Sequential(Held(hold), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    reference = Reference(model, sgd)
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    for seed in range(3):
        batch = mlp_batch(rows=6, seed=seed)
        loss = reference.forward_backward(batch.split(2), batch.loss_fn)
        devices.check(run_batch(engine, batch, 2), loss)
        assert all(parameter.grad is None for parameter in model.parameters()), "a gradient leaked"
        reference.step()
        engine.step(optimizer.step, is_async=False)
    devices.check(engine_weights(engine), reference.weights)


class ReturnsItsWeight(nn.Module):
    """As a layer does whose weight a later one is tied to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(MLP_WIDTH, MLP_WIDTH) / 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden @ self.weight, self.weight, self.weight[0]


class PassesItOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(MLP_WIDTH, MLP_WIDTH) / 4)

    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, row = value
        return (hidden @ self.weight).tanh(), weight, row


class UsesIt(PassesItOn):
    def forward(self, value: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        hidden, weight, row = value
        return hidden @ self.weight @ weight + row


def make_handing_on() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(ReturnsItsWeight(), PassesItOn(), UsesIt())


@pytest.mark.parametrize(
    "plan",
    [
        ONE_LAYER_EACH,
        stages(range(2), backward=[range(2, 3), range(2)]),
        stages(backward=[range(3)]),
    ],
    ids=["one layer each", "two stages", "fused"],
)
def test_a_layer_may_return_its_own_weight(
    plan: ModelExecutePlan, devices: DeviceSet, engines: Engines
) -> None:
    """The whole of it and a view; with and without grad."""
    model = make_handing_on()
    expected = plain_call(copy.deepcopy(model), BATCH.split(2), BATCH.loss_fn)
    engine = engines(model, devices)
    devices.check(run_batch(engine, BATCH, 2, execute_plan=plan), expected.loss)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)
    with torch.no_grad():
        devices.check(engine(*BATCH.args), model(*BATCH.args), bitwise=False)


class Scaling(nn.Module):
    """Writes to its input, and its gradient needs what it wrote."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(0.5).tanh_()


@pytest.mark.parametrize(
    "first", [nn.Identity, nn.Dropout, nn.Flatten], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize(
    "second", [lambda: nn.SiLU(inplace=True), Scaling], ids=["SiLU", "Scaling"]
)
@pytest.mark.parametrize(
    "plan",
    [
        stages(range(1), range(1, 3), backward=[range(3, 4), range(1, 3), range(1)]),
        stages(
            range(1),
            range(1, 2),
            range(2, 3),
            backward=[range(3, 4), range(2, 3), range(1, 2), range(1)],
        ),
        stages(range(1), backward=[range(1, 4), range(1)]),
    ],
    ids=["together", "apart", "fused"],
)
def test_a_layer_that_hands_on_its_input_before_one_that_writes_in_place(
    first: type[nn.Module],
    second: Callable[[], nn.Module],
    plan: ModelExecutePlan,
    devices: DeviceSet,
    engines: Engines,
) -> None:
    """Identity does, and so do Dropout in evaluation and Flatten of what is flat."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH), first(), second(), nn.Linear(MLP_WIDTH, MLP_WIDTH)
    ).eval()
    expected = plain_call(copy.deepcopy(model), BATCH.split(2), BATCH.loss_fn)
    engine = engines(model, devices)
    for _ in range(2):  # the second call knows what it learnt in the first
        devices.check(run_batch(engine, BATCH, 2, execute_plan=plan), expected.loss)
        devices.check(engine_gradients(engine), expected.gradients)
        engine.zero_grad()
