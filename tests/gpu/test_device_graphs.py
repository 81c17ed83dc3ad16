"""CUDA graphs of layers: the numbers without them to the bit, and what cannot be recorded."""

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.device import AcceleratorDevice
from roundpipe.params.placement.device_states import DeviceStates
from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.engines import Engines, engine_weights

pytestmark = pytest.mark.gpu
ONE = DeviceSet(kind="cuda", count=1)


def test_work_that_waits_for_a_value_is_not_recorded_and_draws_go_on() -> None:
    device = AcceleratorDevice(torch.device("cuda", 0))
    x = torch.ones(4, device=device.torch_device)
    made: list[Tensor] = []

    def waits() -> None:
        made[:] = [x * x.sum().item()]

    def draws() -> None:
        made[:] = [x + torch.rand_like(x)]

    with device.compute.work():
        assert device.capture(waits) is None
        assert device.capture(draws, waits) is None
        device.seed(3)
        expected = x + torch.rand_like(x)
        recorded = device.capture(draws)
        assert recorded is not None
        device.seed(3)
        recorded.replays[0]()
        assert torch.equal(made[0], expected)
        assert not torch.equal(torch.rand_like(x), torch.rand_like(x))


def test_after_work_that_is_not_recorded_memory_of_other_streams_is_taken_back() -> None:
    device = AcceleratorDevice(torch.device("cuda", 0))

    def waits() -> None:
        x.sum().item()

    x = torch.ones(4, device=device.torch_device)
    with device.compute.work():
        assert device.capture(waits) is None
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            lent = torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)
            device.down.borrow(lent)
            del lent
            torch.cuda.synchronize()
        torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)
        assert torch.cuda.memory_allocated() <= before
    device.trim()


class ScaledOnTheHost(nn.Module):
    """What it multiplies by is a number on the host, which a recording would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, scale = given
        return torch.tanh(self.inner(hidden)) * scale, scale


class ReadsScale(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.tensor(x.shape[0] * _scale[0])


_scale = [1.0]


def test_a_number_on_the_host_is_not_recorded(engines: Engines) -> None:
    def run(*, captures: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(ReadsScale(), *(ScaledOnTheHost() for _ in range(4)))
        engine = engines(model, ONE, cuda_graphs=captures, optim_dtype=torch.float32)
        optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
        losses = []
        for step in range(12):
            _scale[0] = 1.0 / (1 + step)
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            loss = engine.forward_backward(
                (x,), label=x, loss_fn=lambda out, label: nn.functional.mse_loss(out[0], label)
            )
            losses.append(loss.item())
            engine.step(optimizer.step, is_async=False)
        engine.close()
        return losses

    assert run(captures=True) == run(captures=False)


@pytest.mark.parametrize("on", ACCELERATORS, ids=str)
@pytest.mark.parametrize("trained", ["full", "lora", "adapters of experts"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_losses_and_weights_are_equal_to_the_bit(
    engines: Engines,
    replays: list[int],
    monkeypatch: pytest.MonkeyPatch,
    on: DeviceSet,
    *,
    trained: str,
    is_async: bool,
) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }

    def run(captures: bool | None) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        if trained == "adapters of experts":
            experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).bfloat16()
            adapters = LoraConfig(
                r=4,
                init_lora_weights=False,
                target_modules=["q_proj"],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            )
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
            adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
        if trained != "full":
            model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
        engine = engines(
            model.train(),
            on,
            cuda_graphs=captures,
            optim_dtype=torch.float32,
            # Where a microbatch is computed decides in which order its gradients are added, and
            # a measured plan would follow the times of the run.
            model_run_config=RoundPipeRunConfig(
                execute_plan=ModelExecutePlan([], [range(6)] * on.count)
            ),
        )
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-3)
        generator, losses = torch.Generator().manual_seed(2), []
        for _ in range(16):
            ids = torch.randint(0, 128, (8, 32), generator=generator)
            losses.append(
                engine.forward_backward(input_kwargs={"input_ids": ids, "labels": ids}).item()
            )
            engine.step(optimizer.step, is_async=is_async)
        weights = engine_weights(engine)
        engine.close()
        return losses, weights

    # Measurements decide at which step optimizer state moves to the device, where it is rounded
    # otherwise, so here it moves with the first update.
    monkeypatch.setattr(
        DeviceStates, "let", lambda states, *_, **__: setattr(states, "_limit", float(1 << 30))
    )
    expected, actual = run(captures=False), run(captures=None)
    assert actual[0] == expected[0]
    assert all(torch.equal(actual[1][name], value) for name, value in expected[1].items())
    assert replays, "nothing was captured"


class Sorting(nn.Module):
    """Looks at a value, as some routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) if hidden.sum().item() > -1e9 else hidden


def test_a_layer_that_looks_at_values_runs_as_it_is(
    engines: Engines, replays: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def run(*, captures: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Sorting() for _ in range(4)))
        engine = engines(model, ONE, cuda_graphs=captures, optim_dtype=torch.float32)
        optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
        losses = []
        for step in range(12):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            loss = engine.forward_backward((x,), label=x, loss_fn=nn.functional.mse_loss)
            losses.append(loss.item())
            engine.step(optimizer.step, is_async=False)
        engine.close()
        return losses

    with caplog.at_level(logging.INFO, logger="roundpipe"):
        actual = run(captures=True)
    assert "cannot be captured" in caplog.text
    assert not replays
    assert actual == run(captures=False)
