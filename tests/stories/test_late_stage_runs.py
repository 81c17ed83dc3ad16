"""What the caller did right after `forward_backward` had returned changed the gradients of that
very call.

The call returns when its loss is known and backward stage runs go on. They looked at `.training`
and `.requires_grad` of the user's modules as these were by then: with the evaluation that follows a
training step, batch norm was recomputed in evaluation mode, silently. And an error that came so
late took the finished steps before it along when the engine was closed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.late_work import LATE, make_pausing, open_gate
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.optimizers import Gate
from tests.support.reference import Reference, buffers_of, plain_call, weights_of

BATCH = mlp_batch(rows=6)
OTHER = mlp_batch(rows=6, seed=1)


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
@pytest.mark.parametrize(
    "switch",
    [
        lambda engine: engine.eval(),
        lambda engine: engine.model.eval(),
        lambda engine: engine.model[1].eval(),
        lambda engine: engine.model[0].requires_grad_(False),
        lambda engine: engine.model.requires_grad_(False),
    ],
    ids=["engine.eval", "model.eval", "layer.eval", "layer.requires_grad_", "model.requires_grad_"],
)
def test_switching_modes_after_the_call_does_not_change_its_gradients(
    switch: Callable[[Any], object], devices: DeviceSet, engines: Engines
) -> None:
    gate = Gate()
    plain = make_pausing(open_gate())
    expected = plain_call(plain, BATCH.split(2), BATCH.loss_fn)
    engine = engines(make_pausing(gate), devices)
    run_batch(engine, BATCH, 2, execute_plan=LATE)
    gate.wait_reached()
    switch(engine)
    gate.open()
    engine.synchronize()
    engine.train()
    engine.model.requires_grad_(True)
    devices.check(engine_gradients(engine), expected.gradients)
    devices.check(buffers_of(engine.model), buffers_of(plain))


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
def test_an_evaluation_while_gradients_are_still_to_come(
    devices: DeviceSet, engines: Engines
) -> None:
    """As training loops do it. The evaluation needs no gradients, so it may run before the backward
    stage runs or after."""
    gate = open_gate()
    plain = make_pausing(open_gate())
    engine = engines(make_pausing(gate), devices)
    for batch in (BATCH, OTHER):
        expected = plain_call(plain, batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2, execute_plan=LATE)
        engine.eval()
        plain.eval()
        with torch.no_grad():
            devices.check(engine(*BATCH.args), plain(*BATCH.args), bitwise=False)
        engine.train()
        plain.train()
        devices.check(engine_gradients(engine), expected.gradients)
        engine.zero_grad()


class Boom(Exception):
    """The user's own exception."""


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: "FailsLate") -> Tensor:
        ctx.layer = layer
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.layer.fails.is_set():
            raise Boom("raised in a late backward")
        return gradient, None


class Flag:
    """A flag that replicas share with the user's module."""

    def __init__(self) -> None:
        self._value = False

    def set(self) -> None:
        self._value = True

    def is_set(self) -> bool:
        return self._value


class FailsLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = Flag()

    def forward(self, hidden: Tensor) -> Tensor:
        failing: Tensor = _Failing.apply(hidden, self)
        return failing


@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_closing_with_a_late_error_keeps_the_steps_before_it(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    gate, failing = open_gate(), FailsLate()
    plain = make_pausing(gate)
    plain[3] = nn.Identity()
    reference = Reference(plain, sgd)
    reference.forward_backward(BATCH.split(2), BATCH.loss_fn)
    reference.step()

    model = make_pausing(gate, nn.BatchNorm1d(MLP_WIDTH), nn.Sequential(nn.Tanh(), failing))
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    run_batch(engine, BATCH, 2, execute_plan=LATE)
    engine.step(optimizer.step, is_async=is_async).wait()
    model[3].gate = gate = Gate()
    failing.fails.set()
    run_batch(engine, OTHER, 2, execute_plan=LATE)
    gate.open()
    with pytest.raises(Boom):
        engine.close()
    devices.check(weights_of(model), reference.weights)
