"""Adapters of stacked experts over packed ones: losses and gradients are those of the model with
the dense weights that the parts stand for."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.quantized import FORMATS, QuantizedWeight, quantizable
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, engine_gradients
from tests.support.mixtures import CONFIGS, SIZES_OF_SFT, STACKS

ROWS, TOKENS = 6, 8
SIZES = SIZES_OF_SFT | {"hidden_size": 64, "intermediate_size": 64}
STAGES = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 5), range(2, 4), range(2)]
)


def made(name: str, form: str) -> nn.Module:
    """Every weight that the format is for is packed, and has an adapter where it is of experts."""
    torch.manual_seed(0)
    config = CONFIGS[name](SIZES)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    for path in quantizable(model, form):
        owner, _, own = path.rpartition(".")
        weight = model.get_parameter(path).detach()
        packed = QuantizedWeight.quantize(weight, FORMATS[form])
        module = model.get_submodule(owner)
        setattr(module, own, nn.Parameter(packed, requires_grad=False))
    adapters: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "target_parameters": STACKS}
    return get_peft_model(model, LoraConfig(**adapters, init_lora_weights=False))


def dense(name: str, form: str) -> nn.Module:
    model = made(name, form)
    for module in model.modules():
        for own, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, QuantizedWeight):
                setattr(module, own, nn.Parameter(weight.dequantize(), requires_grad=False))
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, SIZES["vocab_size"], (ROWS, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


def results(
    engines: Engines, model: nn.Module, devices: DeviceSet, plan: ModelExecutePlan | None
) -> tuple[Tensor, dict[str, Tensor]]:
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    loss = engine.forward_backward(input_kwargs=batch(), run_config=config)
    return loss.detach(), engine_gradients(engine)


@pytest.mark.parametrize("plan", [None, STAGES], ids=["fused", "recomputed"])
@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3-moe", "nf4"), ("qwen3-moe", "fp8"), ("qwen3-moe", "int8"), ("gpt-oss", "mxfp4")],
)
def test_adapters_train_as_over_dense_experts(
    engines: Engines, name: str, form: str, devices: DeviceSet, plan: ModelExecutePlan | None
) -> None:
    packed = made(name, form)
    assert any(isinstance(w, QuantizedWeight) for n, w in packed.named_parameters() if "exp" in n)
    loss, gradients = results(engines, packed, devices, plan)
    expected, expected_gradients = results(engines, dense(name, form), devices, plan)
    assert torch.equal(loss, expected)
    devices.check(gradients, expected_gradients)
    plain = dense(name, form)
    own = plain(**batch()).loss
    own.backward()
    torch.testing.assert_close(loss, own.detach(), rtol=1e-6, atol=1e-6)
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert any("experts" in one for one in wanted)
    for one, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[one], rtol=1e-4, atol=1e-5, msg=one)
