"""What a layer did with one batch was taken for what it always does, and its weights got no
gradients any more.

The engine runs most forwards without autograd and has to know which outputs of a layer carry a
gradient. It learnt that once per layer, from the first microbatch. A layer may decide anew each
time: by a flag it is called with, by what is in its input (experts to which nothing was routed), by
an attribute that the user switches. One call that took the branch without gradients silently froze
the layer for good.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import Microbatch, plain_call

ONE_LAYER_EACH = ModelExecutePlan(
    fwd_plan=[range(1), range(1, 2)], bwd_plan=[range(2, 3), range(1, 2), range(1)]
)
BATCH = mlp_batch(rows=6)


class Flagged(nn.Module):
    """Hands on a gradient, or not, or two tensors instead of one, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor, how: str = "plain") -> Any:
        hidden = self.linear(hidden)
        if how == "stop":
            return hidden.detach()
        return (hidden, hidden * 2) if how == "two" else hidden


class Routed(Flagged):
    """Uses its weights only if the batch has something for them."""

    def forward(self, hidden: Tensor, how: str = "plain") -> Any:
        return self.linear(hidden) if bool((hidden > 0).any()) else hidden


class Switched(Flagged):
    """As the user's attribute says."""

    stops = False

    def forward(self, hidden: Tensor, how: str = "plain") -> Any:
        hidden = self.linear(hidden)
        return hidden.detach() if self.stops else hidden


class Joining(nn.Module):
    """Takes one tensor, or a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, value: Any) -> Tensor:
        return self.linear(value[0] + value[1] if isinstance(value, tuple) else value)


class Chain(nn.Sequential):
    """The plain model: gives the flag to its first layer, as the engine does with a plain sequence
    of its layers."""

    def forward(self, hidden: Tensor, how: str = "plain") -> Tensor:
        first, *others = self
        value = first(hidden, how)
        for layer in others:
            value = layer(value)
        return value


def make_model(first: type[Flagged]) -> Chain:
    torch.manual_seed(0)
    return Chain(first(), Joining(), nn.Linear(MLP_WIDTH, MLP_WIDTH))


def microbatches_of(inputs: Tensor, how: str = "plain") -> list[Microbatch]:
    parts = zip(inputs.chunk(2), BATCH.label.chunk(2), strict=True)
    return [Microbatch((part,), {"how": how}, label) for part, label in parts]


def call(engine: RoundPipe, microbatches: list[Microbatch]) -> None:
    engine.forward_backward(
        microbatches=microbatches,
        loss_fn=BATCH.loss_fn,
        run_config=RoundPipeRunConfig(execute_plan=ONE_LAYER_EACH),
    )
    engine.synchronize()


@pytest.mark.parametrize("first", ["plain", "stop", "two"])
@pytest.mark.parametrize("second", ["plain", "stop", "two"])
def test_a_flag_that_changes_what_a_layer_hands_on(
    first: str, second: str, devices: DeviceSet, engines: Engines
) -> None:
    model = make_model(Flagged)
    expected = plain_call(
        copy.deepcopy(model), microbatches_of(BATCH.args[0], second), BATCH.loss_fn
    )
    assert ("0.linear.weight" in expected.gradients) == (second != "stop")
    engine = engines(nn.Sequential(*model), devices)
    call(engine, microbatches_of(BATCH.args[0], first))
    engine.zero_grad()
    call(engine, microbatches_of(BATCH.args[0], second))
    devices.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize("first", ["used", "unused"])
def test_a_layer_whose_weights_only_some_batches_use(
    first: str, devices: DeviceSet, engines: Engines
) -> None:
    inputs = {"used": BATCH.args[0].abs(), "unused": -BATCH.args[0].abs()}
    model = make_model(Routed)
    engine = engines(nn.Sequential(*model), devices)
    call(engine, microbatches_of(inputs[first]))
    engine.zero_grad()
    for name, value in inputs.items():
        expected = plain_call(copy.deepcopy(model), microbatches_of(value), BATCH.loss_fn)
        assert ("0.linear.weight" in expected.gradients) == (name == "used")
        engine.zero_grad()
        call(engine, microbatches_of(value))
        devices.check(engine_gradients(engine), expected.gradients)


def test_a_layer_whose_weights_only_one_of_the_microbatches_uses(
    devices: DeviceSet, engines: Engines
) -> None:
    """The other one is first, so it is the one the engine learns from."""
    inputs = torch.cat([-BATCH.args[0][:3].abs(), BATCH.args[0][3:].abs()])
    model = make_model(Routed)
    expected = plain_call(copy.deepcopy(model), microbatches_of(inputs), BATCH.loss_fn)
    assert "0.linear.weight" in expected.gradients
    engine = engines(nn.Sequential(*model), devices)
    for _ in range(2):
        call(engine, microbatches_of(inputs))
        devices.check(engine_gradients(engine), expected.gradients)
        engine.zero_grad()


@pytest.mark.parametrize("first", [True, False], ids=["stopping first", "carrying first"])
def test_an_attribute_that_the_user_switches_between_calls(
    first: bool, devices: DeviceSet, engines: Engines
) -> None:
    model = make_model(Switched)
    engine = engines(nn.Sequential(*model), devices)
    for stops in (first, not first, first):
        model[0].stops = stops
        expected = plain_call(copy.deepcopy(model), microbatches_of(BATCH.args[0]), BATCH.loss_fn)
        assert ("0.linear.weight" in expected.gradients) == (not stops)
        call(engine, microbatches_of(BATCH.args[0]))
        devices.check(engine_gradients(engine), expected.gradients)
        engine.zero_grad()
