"""With the first layers frozen, recompute warned about inputs without grad and later layers
silently got none.

The input of the first layer is made of integers or comes out of frozen layers, so it does not
require grad, and a checkpoint around it cut the graph. Every architecture trains here with its
first layers frozen, with adapters only, and with a frozen stage in the middle, everything
recomputed. Frozen weights stay to the bit, though the optimizer decays weights by half, and cost
neither gradient nor moment nor master.

Source: huggingface/transformers#23170, modelscope/ms-swift#10142, OpenRLHF/OpenRLHF#1258,
pytorch/ao#1209.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeError, RoundPipeRunConfig
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, train_steps
from tests.support.models import make_mlp, mlp_batch
from tests.support.preset_models import (
    INPUTS,
    LANGUAGE_MODELS,
    gradients_of,
    images,
    make_model,
    make_vit,
    own_forward,
)
from tests.support.reference import weights_of

ARCHITECTURES = [*LANGUAGE_MODELS, "vit"]


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make(name: str) -> tuple[Any, dict[str, Any]]:
    return (make_vit(), images()) if name == "vit" else (make_model(name), INPUTS["labels"]())


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == 3
    )


def freeze_the_first(model: nn.Module) -> None:
    """All embeddings and two of the three blocks."""
    for block in blocks_of(model)[:2]:
        block.requires_grad_(False)
    inside = {id(p) for block in blocks_of(model) for p in block.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside and ("embed" in name or "wte" in name or "wpe" in name):
            parameter.requires_grad_(False)


def freeze_the_middle(model: nn.Module) -> None:
    blocks_of(model)[1].requires_grad_(False)


def recomputing_plan(engine: RoundPipe) -> ModelExecutePlan:
    """One layer each; only the last one is not recomputed."""
    count = engine.statistics()["layers"]
    stages = [range(index, index + 1) for index in range(count)]
    return ModelExecutePlan(fwd_plan=stages[:-1], bwd_plan=stages[::-1])


def call(engine: RoundPipe, kwargs: dict[str, Any]) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=recomputing_plan(engine))
    engine.forward_backward(input_kwargs=kwargs, run_config=config)


def check_training(
    model: Any, kwargs: dict[str, Any], devices: DeviceSet, engines: Engines
) -> None:
    start = weights_of(model)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    _, expected = own_forward(copy.deepcopy(model), kwargs)
    assert expected.keys() == trains
    engine = engines(model, devices)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.01, weight_decay=0.5)
    for number in range(2):
        with no_warning():
            call(engine, kwargs)
            gradients = engine_gradients(engine)
        if number == 0:
            devices.check(gradients, expected, bitwise=False)
            assert {n for n, g in gradients.items() if g.any()} == {
                n for n, g in expected.items() if g.any()
            }
        with no_warning():
            engine.step(optimizer.step, is_async=False)
            weights = engine_weights(engine)
    changed = {name for name, value in weights.items() if not torch.equal(value, start[name])}
    assert changed == trains
    check_memory(engine, optimizer, trains)


def check_memory(engine: RoundPipe, optimizer: torch.optim.Optimizer, trains: set[str]) -> None:
    """Masters and moments are there for what trains only."""
    trained = [parameter for name, parameter in engine.model.named_parameters() if name in trains]
    assert engine.statistics()["master_bytes"] == sum(parameter.nbytes for parameter in trained)
    assert len(optimizer.state) == len(trained)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_embeddings_and_first_blocks_frozen(name: str, engines: Engines) -> None:
    model, kwargs = make(name)
    freeze_the_first(model)
    check_training(model, kwargs, TWO, engines)


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_a_middle_block_frozen(name: str, engines: Engines) -> None:
    model, kwargs = make(name)
    freeze_the_middle(model)
    check_training(model, kwargs, TWO, engines)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_adapters_only_and_nobody_asked_for_gradients_of_inputs(
    name: str, engines: Engines
) -> None:
    """Rank-2 adapters; B starts random, or every gradient of A would be zero."""
    model, kwargs = make(name)
    target = "c_attn" if name == "gpt2" else "q_proj"
    config = LoraConfig(
        r=2, target_modules=[target], init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    adapted = get_peft_model(model, config)
    gradients_of(adapted)
    check_training(adapted, kwargs, ONE, engines)


WORKING: dict[str, Callable[[RoundPipe], list[nn.Parameter]]] = {
    "model.parameters()": lambda engine: list(engine.model.parameters()),
    "engine.parameters()": lambda engine: list(engine.parameters()),
}


@pytest.mark.parametrize("which", WORKING)
def test_an_optimizer_over_all_parameters_frozen_ones_included(
    which: str, engines: Engines
) -> None:
    """Over the user's own parameters it is refused. Masters there are for what trains only: decay
    reaches no other."""
    model = make_mlp()
    model[0].requires_grad_(False)
    start = weights_of(model)
    engine = engines(model, TWO)
    wrong = torch.optim.AdamW(WORKING[which](engine), lr=0.1, weight_decay=0.5)
    engine.forward_backward(
        (mlp_batch(4).args[0],), loss_fn=lambda output, _: output.square().sum()
    )
    with pytest.raises(RoundPipeError, match="optim_parameters"):
        engine.step(wrong.step, is_async=False)
    for name, value in engine_weights(engine).items():
        assert torch.equal(value, start[name]), name


def test_unfreezing_after_the_optimizer_was_made_raises_and_a_new_optimizer_trains_it(
    engines: Engines,
) -> None:
    model = make_mlp()
    model[0].requires_grad_(False)
    engine = engines(model, TWO)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.01, weight_decay=0.5)
    batches = [mlp_batch(rows=6, seed=seed) for seed in range(2)]
    train_steps(engine, optimizer, batches, 2, is_async=False)
    before = engine_weights(engine)
    model[0].requires_grad_(True)
    with pytest.raises(RoundPipeError, match=r"0\.(weight|bias)"):
        train_steps(engine, optimizer, batches[:1], 2, is_async=False)
    engine.zero_grad()
    again = torch.optim.AdamW(engine.optim_parameters(), lr=0.01, weight_decay=0.5)
    train_steps(engine, again, batches[:1], 2, is_async=False)
    changed = {
        name
        for name, value in engine_weights(engine).items()
        if not torch.equal(value, before[name])
    }
    assert changed == {name for name, _ in model.named_parameters()}
