"""Mixtures of experts and models that see, by a GPU's own kernels: grouped products of experts with
adapters, whose ranks they only take padded, and the models' own forward in parts there."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from roundpipe import RoundPipeRunConfig
from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.engines import Engines, engine_gradients
from tests.support.preset_models import INPUTS, ROWS, TOKENS, make_model
from tests.support.tolerances import assert_same_sums
from tests.support.vision_models import NO_IMAGES, SEEING, make_seeing, seen_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
GPU = torch.device("cuda", 0)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
devices_of_one_kind = pytest.mark.parametrize("devices", ACCELERATORS, ids=str)


@pytest.fixture(autouse=True)
def _without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which convolutions of patches would use, each size with another error."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def own_step(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the model's own forward on the GPU."""
    there = copy.deepcopy(model).to(GPU)
    given = {name: v.to(GPU) if isinstance(v, Tensor) else v for name, v in batch.items()}
    loss = there(**given).loss
    loss.backward()
    gradients = {
        name: parameter.grad.cpu()
        for name, parameter in there.named_parameters()
        if parameter.grad is not None
    }
    return loss.detach().cpu(), gradients


@devices_of_one_kind
@pytest.mark.parametrize("name", SEEING)
def test_models_that_see(engines: Engines, name: str, devices: DeviceSet) -> None:
    model = make_seeing(name)
    batches = [seen_batch(model), seen_batch(model, NO_IMAGES)]
    expected = [own_step(model, batch) for batch in batches]
    engine = engines(model, devices)
    for batch, (loss, gradients) in zip(batches, expected, strict=True):
        config = RoundPipeRunConfig(num_microbatch=2)
        ours = engine.forward_backward(input_kwargs=batch, run_config=config)
        assert_same_sums(ours.cpu(), loss, terms=ROWS * TOKENS)
        # A rounding error on the way down to the patches is one of every gradient below it.
        found = engine_gradients(engine)
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key].cpu(), gradient, rtol=1e-3, atol=1e-5)
        engine.zero_grad()


@devices_of_one_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_adapters_of_experts(
    engines: Engines, name: str, implementation: str, dtype: torch.dtype, devices: DeviceSet
) -> None:
    """As close to the model in fp32 as PEFT's own forward is, or twice as far."""
    model = make_model(name)
    model.config._experts_implementation = implementation
    torch.manual_seed(3)
    adapters = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=EXPERTS, init_lora_weights=False
    )
    model = get_peft_model(model, adapters).to(dtype)
    batch = INPUTS["padded left"]()
    loss, exact = own_step(copy.deepcopy(model).float(), batch)
    theirs, _ = own_step(model, batch)
    engine = engines(model, devices)
    ours = engine.forward_backward(
        input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=2)
    )
    room = torch.finfo(dtype).eps * 8 * loss.abs()
    assert (ours.cpu() - loss).abs() <= 2 * (theirs.float() - loss).abs() + room
    found = engine_gradients(engine)
    assert found.keys() == exact.keys()
    if dtype is torch.float32:
        for key, gradient in exact.items():
            torch.testing.assert_close(found[key].cpu(), gradient, rtol=1e-3, atol=1e-5)
