"""Mixtures of experts that see: the auxiliary loss of their routers, adapters of their experts, and
packed rows are those of the model's own forward, whatever images are in which rows."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.errors import ConfigError
from tests.presets.test_routing import MoodyRouter
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.mixtures import STACKS
from tests.support.preset_models import ROWS, TOKENS, gradients_of, own_forward
from tests.support.tolerances import assert_same_sums
from tests.support.vision_models import NO_IMAGES, NUM_IMAGES, make_seeing, seen_batch

MIXTURES = ["qwen3-vl-moe", "qwen3.5-moe"]
CUTS = [(1, ONE), (ROWS, ONE), (3, THREE)]
# Of gradients under adapters of experts, which PEFT adds to the weights and the engine does not.
# Linear attention makes more of rounding: PEFT's own are up to 2.3e-6 from those in float64.
REASSOCIATED = 1e-5


def made_to_listen(name: str, *, adapts: bool) -> Any:
    """With a coefficient that would show if the loss were left out, or a mean over microbatches."""
    model = make_seeing(name)
    model.config.text_config.router_aux_loss_coef = 0.5
    if not adapts:
        return model
    torch.manual_seed(3)
    config = LoraConfig(
        r=2,
        target_modules=["qkv", "q_proj", "v_proj"],
        target_parameters=STACKS,
        init_lora_weights=False,
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize(("count", "devices"), CUTS, ids=str)
@pytest.mark.parametrize("num_images", [NUM_IMAGES, (0, 1, 0, 2), NO_IMAGES], ids=str)
@pytest.mark.parametrize("adapts", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_auxiliary_loss_is_the_models_own(
    engines: Engines,
    name: str,
    adapts: bool,
    num_images: tuple[int, ...],
    count: int,
    devices: DeviceSet,
) -> None:
    """It was refused. A microbatch without images has its part of it; padding counts for
    nothing."""
    model = made_to_listen(name, adapts=adapts)
    batch = seen_batch(model, num_images)
    kwargs = {**batch, "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    without, _ = own_forward(copy.deepcopy(model), batch)
    assert not torch.equal(theirs.loss, without.loss)
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=count)
    loss, ours = engine.forward_backward(
        input_kwargs=kwargs, return_outputs=True, run_config=config
    )
    engine.synchronize()
    if count == 1 and not adapts:
        assert torch.equal(ours.loss, theirs.loss)
        assert torch.equal(ours.aux_loss, theirs.aux_loss)
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(ours.aux_loss, theirs.aux_loss, terms=ROWS * TOKENS)
    gradients = gradients_of(engine.model)
    if adapts:
        torch.testing.assert_close(gradients, expected, rtol=0, atol=REASSOCIATED)
    else:
        assert_same_sums(gradients, expected, terms=ROWS * TOKENS)
    with torch.no_grad():
        ours = engine(**kwargs, roundpipe_run_config=config)
    assert_same_sums(ours.loss, theirs.loss, terms=ROWS * TOKENS)
    assert list(ours) == [key for key in theirs if key in ours]
    # Without it, the batch is as any other.
    loss = engine.forward_backward(input_kwargs=batch, run_config=config)
    assert_same_sums(loss, without.loss, terms=ROWS * TOKENS)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_layer_is_a_stage(engines: Engines, name: str) -> None:
    """What routers say travels from device to device, past what is added between blocks, and each
    block is run again."""
    model = made_to_listen(name, adapts=False)
    kwargs = {**seen_batch(model), "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    layers = 2 + model.config.vision_config.depth + 1 + model.config.text_config.num_hidden_layers
    plan = ModelExecutePlan(
        fwd_plan=[range(i, i + 1) for i in range(layers - 1)],
        bwd_plan=[range(i, i + 1) for i in reversed(range(layers))],
    )
    engine = engines(model, THREE)
    loss = engine.forward_backward(
        input_kwargs=kwargs, run_config=RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    )
    engine.synchronize()
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


@pytest.mark.parametrize("layer", [0, 2], ids=["changed after", "plain"])
def test_a_recompute_chooses_the_experts_of_the_forward(engines: Engines, layer: int) -> None:
    """Also in a block after which the model adds what the tower has seen."""
    model = make_seeing("qwen3-vl-moe")
    mlp = model.model.language_model.layers[layer].mlp
    chosen: list[torch.Tensor] = []
    engine = engines(model, ONE)
    mlp.gate.register_forward_pre_hook(MoodyRouter())
    mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].clone()))
    plan = ModelExecutePlan(
        fwd_plan=[range(8)], bwd_plan=[range(8, 9), range(4, 8), range(1, 4), range(1)]
    )
    engine.forward_backward(
        input_kwargs=seen_batch(model),
        run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=plan),
    )
    engine.synchronize()
    assert len(chosen) >= 2
    assert all(torch.equal(again, chosen[0]) for again in chosen[1:])


def test_routers_that_are_not_understood(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a call that wants the auxiliary loss is refused, before any work."""
    model = make_seeing("qwen3-vl-moe")
    monkeypatch.setattr(type(model), "_can_record_outputs", {})
    engine = engines(model, ONE)
    with pytest.raises(ConfigError, match="what routers of Qwen3VLMoeForCond.* is not understood"):
        engine.forward_backward(input_kwargs={**seen_batch(model), "output_router_logits": True})
    assert not gradients_of(engine.model)
    engine.forward_backward(input_kwargs=seen_batch(model))


PACKED = torch.tensor([[*range(5), *range(7)], [*range(12)], [*range(9), *range(3)], [*range(12)]])


@pytest.mark.parametrize(("count", "devices"), CUTS, ids=str)
@pytest.mark.parametrize(
    "name", ["llava", "gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen3.5-moe"]
)
def test_packed_rows_with_images(
    engines: Engines, name: str, count: int, devices: DeviceSet
) -> None:
    """Documents are told apart by positions that restart; Qwen's models have those beside the three
    kinds of each token, in front of them."""
    model = make_seeing(name)
    batch = seen_batch(model)
    positions = PACKED
    if "qwen" in name:
        names = ("input_ids", "image_grid_thw", "mm_token_type_ids")
        of_images, _ = model.model.get_rope_index(**{key: batch[key] for key in names})
        positions = torch.cat([PACKED[None], of_images])
    del batch["attention_mask"]
    # With a cache, transformers looks for no documents.
    packed = {**batch, "position_ids": positions, "use_cache": False}
    theirs, expected = own_forward(copy.deepcopy(model), packed)
    in_one = {**packed, "position_ids": positions.clone()}
    in_one["position_ids"][0 if "qwen" in name else slice(None)] = torch.arange(TOKENS)
    assert not torch.equal(own_forward(copy.deepcopy(model), in_one)[0].loss, theirs.loss)
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=count)
    loss = engine.forward_backward(input_kwargs=packed, run_config=config)
    engine.synchronize()
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)
