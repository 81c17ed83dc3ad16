"""Adapters of single parameters, as PEFT puts them on stacked experts: exact over microbatches and
devices."""

import copy
import threading
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from roundpipe import ConfigError, ModelExecutePlan, RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE
from tests.support.engines import Engines, engine_gradients
from tests.support.preset_models import INPUTS, ROWS, TOKENS, make_model, own_forward
from tests.support.tolerances import assert_same_sums

MANY_STAGES = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 5), range(1, 4), range(1)]
)
PATIENCE_S = 0.1


def adapted(name: str) -> Any:
    model = make_model(name)
    torch.manual_seed(3)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_adapters_of_experts(engines: Engines, name: str) -> None:
    """Their forward writes to the parameter it adapts; the graphs of its neighbours in the layer
    must not notice."""
    model, kwargs = adapted(name), INPUTS["padded left"]()
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    assert any("experts" in parameter for parameter in expected)
    for devices, count in [(ONE, 1), (THREE, 3)]:
        engine = engines(model, devices)
        config = RoundPipeRunConfig(num_microbatch=count, execute_plan=MANY_STAGES)
        loss = engine.forward_backward(
            input_kwargs=kwargs, loss_fn=lambda output, _: output.loss, run_config=config
        )
        assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(engine_gradients(engine), expected, terms=ROWS * TOKENS)
        engine.close()


def test_nobody_finds_the_sum_of_another_in_the_cache(engines: Engines) -> None:
    """torch's cache of parametrizations belongs to all threads: one that stays in keeps it full.
    Each waits here for another to come in."""
    model, met = adapted("qwen3-moe"), threading.Event()
    inside = threading.Semaphore(1)

    def enter(*_: Any) -> None:
        if not inside.acquire(blocking=False):
            met.set()
            inside.acquire()

    def leave(*_: Any) -> None:
        met.wait(PATIENCE_S)
        inside.release()

    for block in model.get_base_model().model.layers:
        if hasattr(block.mlp, "experts"):
            block.mlp.experts.base_layer.register_forward_pre_hook(enter)
            block.mlp.experts.base_layer.register_forward_hook(leave)
    # Where they may draw random numbers, layers on virtual devices wait for each other anyway.
    config = RoundPipeRunConfig(
        num_microbatch=3, execute_plan=MANY_STAGES, preserve_rng_state=False
    )
    engine = engines(model, THREE)
    engine.forward_backward(input_kwargs=INPUTS["labels"](), run_config=config)
    engine.synchronize()
    assert not met.is_set()
    assert not parametrize._cache


class Remembering(nn.Module):
    """Writes to a frozen parameter after another one was used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.latest = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        with torch.no_grad():
            self.latest.copy_(self.latest)
        return y


def test_parameters_of_a_layer_count_their_writes_apart(engines: Engines) -> None:
    """As in plain PyTorch. On a device they are views of one buffer, which would share a count."""
    model, x = nn.Sequential(Remembering(), Remembering()), torch.randn(4, 4)
    weights = {"0.weight": model[0].weight, "1.weight": model[1].weight}
    expected = torch.autograd.grad(model(x).square().sum(), [*weights.values()])
    engine = engines(model)
    engine.forward_backward((x,), loss_fn=lambda output, _: output.square().sum())
    wanted = dict(zip(weights, expected, strict=True))
    assert_same_sums(engine_gradients(engine), wanted, terms=len(x))


class Averaging(nn.Module):
    """Keeps a running average as a frozen parameter, as some quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x) - self.mean


def test_a_frozen_parameter_that_a_forward_changes_is_refused(engines: Engines) -> None:
    """It would go on changing in plain PyTorch, and silently stand still here."""
    model = nn.Sequential(Averaging(), nn.Linear(4, 1))
    engine = engines(model)
    with pytest.raises(
        ConfigError,
        match=r"Averaging.forward writes to its frozen parameter 'mean'.*register_buffer",
    ):
        engine.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, _: output.sum())
    assert torch.equal(model[0].mean, torch.zeros(4))
