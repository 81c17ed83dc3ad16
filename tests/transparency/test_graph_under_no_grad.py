"""``requires_grad`` of a call beats the context it is made in.

Under ``torch.no_grad()`` a forward with ``requires_grad=True`` kept all that a backward needs, and
returned outputs without a graph.
"""

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ConfigError, RoundPipeRunConfig, virtual, wrap_model_to_roundpipe
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, engine_gradients
from tests.support.models import make_mlp, mlp_batch

BATCH = mlp_batch(rows=4)


def expected_gradients(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("num_microbatch", [1, 2])
def test_a_call_may_ask_for_a_graph_under_no_grad(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make_mlp(), devices)
    x = BATCH.args[0].clone().requires_grad_()
    config = RoundPipeRunConfig(requires_grad=True, num_microbatch=num_microbatch)
    with torch.no_grad():
        output = engine(x, roundpipe_run_config=config)
        assert not torch.is_grad_enabled()
    assert output.requires_grad
    output.square().sum().backward()
    theirs = BATCH.args[0].clone().requires_grad_()
    devices.check(engine_gradients(engine), expected_gradients(make_mlp(), theirs), bitwise=False)
    assert x.grad is not None
    assert theirs.grad is not None
    devices.check(x.grad, theirs.grad, bitwise=False)


def test_a_call_may_ask_for_none_with_grad(devices: DeviceSet, engines: Engines) -> None:
    engine = engines(make_mlp(), devices)
    config = RoundPipeRunConfig(requires_grad=False)
    assert not engine(*BATCH.args, roundpipe_run_config=config).requires_grad


def test_inference_mode_has_no_graphs(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    config = RoundPipeRunConfig(requires_grad=True)
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode"):
        engine(*BATCH.args, roundpipe_run_config=config)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = make_mlp(), make_mlp(seed=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x).tanh()


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_a_model_in_parts_may_be_asked_too(devices: DeviceSet) -> None:
    config = RoundPipeRunConfig(requires_grad=True)
    with wrap_model_to_roundpipe(
        Branching(), lower_threshold=1, upper_threshold=1, devices=virtual(devices.count)
    ) as engine:
        with torch.no_grad():
            output = engine(*BATCH.args, roundpipe_run_config=config)
        output.square().sum().backward()
        devices.check(
            engine_gradients(engine), expected_gradients(Branching(), *BATCH.args), bitwise=False
        )
