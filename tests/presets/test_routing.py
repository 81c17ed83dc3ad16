"""Mixture of experts: a recompute sends tokens where the forward sent them, and the auxiliary loss
is the model's own.

On the CPU a recompute repeats the forward to the bit, so a router is made here whose second answer
differs from its first, as another kernel's rounding may make it.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig

from roundpipe import ConfigError, ModelExecutePlan, RoundPipeRunConfig
from roundpipe.presets import preset as presets
from tests.support.device_sets import ONE, THREE
from tests.support.engines import Engines
from tests.support.preset_models import (
    INPUTS,
    ROWS,
    TINY,
    TOKENS,
    gradients_of,
    make_model,
    own_forward,
    tokens,
)
from tests.support.tolerances import assert_same_sums

RECOMPUTED = ModelExecutePlan(fwd_plan=[range(4)], bwd_plan=[range(4, 5), range(1, 4), range(1)])
ROUTERS = {"qwen3-moe": "gate", "mixtral": "gate", "gpt-oss": "router", "olmoe": "gate"}


def make_moe(name: str) -> Any:
    config = OlmoeConfig(**TINY, num_experts=4, num_experts_per_tok=2) if name == "olmoe" else None
    return make_model(name, config=config)


class MoodyRouter:
    """Negates a router's input at every other call, so that it prefers other experts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, _: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.num_calls += 1
        return args if self.num_calls % 2 else (-args[0],)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_recompute_chooses_the_experts_of_the_forward(
    engines: Engines, name: str, grain: str
) -> None:
    """Without the saved choice the second run would take others: the plain model, run twice,
    does."""
    model = make_moe(name)
    engine = engines(model)
    block = model.model.layers[2].mlp
    moody, chosen = MoodyRouter(), []
    getattr(block, ROUTERS[name]).register_forward_pre_hook(moody)
    block.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].clone()))
    with torch.no_grad():
        model(input_ids=tokens())
        model(input_ids=tokens())
    assert not torch.equal(chosen[0], chosen[1])
    chosen.clear()
    moody.num_calls = 0
    engine.forward_backward(
        input_kwargs=INPUTS["labels"](),
        run_config=RoundPipeRunConfig(
            num_microbatch=1, execute_plan=RECOMPUTED, recompute_grain=grain
        ),
    )
    engine.synchronize()
    assert len(chosen) >= 2
    assert all(torch.equal(again, chosen[0]) for again in chosen[1:])


def test_routing_is_saved_for_each_microbatch(engines: Engines) -> None:
    model = make_moe("qwen3-moe")
    chosen: list[Tensor] = []
    model.model.layers[2].mlp.experts.register_forward_pre_hook(
        lambda _, args: chosen.append(args[1].clone())
    )
    engine = engines(model)
    engine.forward_backward(
        input_kwargs=INPUTS["labels"](),
        run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=RECOMPUTED),
    )
    engine.synchronize()
    # The first forward may run with and without a graph; the last two are the recomputes.
    forwards, recomputes = chosen[:2], chosen[-2:]
    assert not torch.equal(forwards[0], forwards[1])
    assert {tuple(c.flatten().tolist()) for c in forwards} == {
        tuple(c.flatten().tolist()) for c in recomputes
    }


@pytest.mark.parametrize("inputs", ["labels", "padded left"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_the_auxiliary_loss_is_the_models_own(engines: Engines, name: str, inputs: str) -> None:
    """To the bit, its gradient through every router and the tokens it counts included."""
    model, kwargs = make_moe(name), {**INPUTS[inputs](), "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    without, _ = own_forward(copy.deepcopy(model), INPUTS[inputs]())
    assert not torch.equal(theirs.loss, without.loss)
    engine = engines(model, THREE)
    loss, ours = engine.forward_backward(
        input_kwargs=kwargs,
        loss_fn=lambda output, _: output.loss,
        return_outputs=True,
        run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=RECOMPUTED),
    )
    engine.synchronize()
    assert torch.equal(loss, theirs.loss)
    assert torch.equal(ours.aux_loss, theirs.aux_loss)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.router_logits, theirs.router_logits, strict=True)
    )
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


def test_with_the_auxiliary_loss_the_batch_is_not_cut(engines: Engines) -> None:
    """It is a product of two means over all rows, which no sum over microbatches gives; the config
    may ask for it."""
    model = make_moe("qwen3-moe")
    model.config.output_router_logits = True
    theirs, _ = own_forward(copy.deepcopy(model), INPUTS["padded left"]())
    engine = engines(model, ONE)
    with pytest.warns(UserWarning, match="one microbatch"), torch.no_grad():
        ours = engine(
            **INPUTS["padded left"](), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3)
        )
    assert torch.equal(ours.loss, theirs.loss)


def test_experts_stay_stacked(engines: Engines) -> None:
    """One parameter per matrix of all experts, as transformers keeps them, with the names of the
    model."""
    engine = engines(make_moe("qwen3-moe"))
    masters = dict(engine.optim_named_parameters())
    assert masters["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    assert masters["model.layers.0.mlp.experts.down_proj"].shape == (4, 32, 16)


def test_the_generic_preset_refuses_the_auxiliary_loss() -> None:
    """It cannot know how an unknown model makes it."""
    model = make_moe("olmoe")
    made = presets.cut(model)
    assert made is not None
    with pytest.raises(ConfigError, match="output_router_logits"):
        made.sequential[0](input_ids=tokens(), output_router_logits=True)
    model.config.output_router_logits = True
    assert presets.cut(model) is None
