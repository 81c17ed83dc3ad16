"""A small Llama, the same on the meta device and trained by an engine on virtual devices whose
memory is counted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.forecast import measure
from roundpipe.forecast.estimate import Estimate
from roundpipe.quantized import FORMATS, QuantizedWeight, quantizable

ROWS, TOKENS, STEPS = 8, 96, 7
# Of one core of a CPU, roughly; plans on one device depend on memory much more.
RATES = {"tflops": 0.02, "link": 5.0, "host": 5.0, "cores": 1}
MAKERS: dict[str, Any] = {
    "adamw": roundpipe.optim.AdamW,
    "adamw_bf16": roundpipe.optim.LeanAdamW,
    "adamw_8bit": lambda masters: roundpipe.optim.LeanAdamW(masters, moments="8bit"),
    "lion": roundpipe.optim.Lion,
    "sgd": lambda masters: roundpipe.optim.SGD(masters, lr=1e-4),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is asked of an estimate and done in a run. ``own_plan``: the engine chooses its plan;
    else it takes the estimate's, because with several devices that depends on times."""

    memory: str
    lora: int | None = None
    quantization: str = "none"
    is_async: bool = False
    optimizer: str = "adamw"
    devices: int = 1
    microbatches: int = 2
    own_plan: bool = True

    def estimate(self) -> Estimate:
        (found,) = roundpipe.estimate(
            small_config(),
            lora=self.lora,
            seq=TOKENS,
            batch=ROWS,
            num_microbatch=self.microbatches,
            quantization=self.quantization,
            optimizer=self.optimizer,
            async_optimizer=self.is_async,
            pin_model="alloc",
            devices="cpu",
            gpus=self.devices,
            gpu_memory=self.memory,
            **RATES,
        )
        return found


def small_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
    )


def small_model(setup: Setup) -> nn.Module:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(small_config())
    if setup.quantization != "none":
        for name in quantizable(model, setup.quantization):
            path, _, own = name.rpartition(".")
            owner = model.get_submodule(path)
            weight = QuantizedWeight.quantize(
                getattr(owner, own).detach(), FORMATS[setup.quantization]
            )
            setattr(owner, own, nn.Parameter(weight, requires_grad=False))
    if setup.lora is not None:
        model = get_peft_model(model, LoraConfig(r=setup.lora, target_modules="all-linear"))
    return model


@dataclass(frozen=True)
class Measured:
    """``device``: bytes of the fullest one at most, once measurements had settled. ``host``: by
    what for, in the names of an estimate."""

    device: int
    host: dict[str, int]


def run(setup: Setup, predicted: Estimate) -> Measured:
    """Trains some steps."""
    model = small_model(setup)
    config = RoundPipeRunConfig(
        num_microbatch=setup.microbatches,
        execute_plan=None if setup.own_plan else _plan_of(predicted.stages),
    )
    ids = torch.randint(0, 1000, (ROWS, TOKENS))
    inputs = {"input_ids": ids, "labels": ids, "skip_logits": True}
    engine: Any = roundpipe.wrap_model_to_roundpipe(
        model,
        use_sequential_preset=True,
        devices=roundpipe.virtual(setup.devices),
        max_gpu_memory=setup.memory,
        optim_dtype=torch.float32,
        model_run_config=config,
    )
    with engine:
        optimizer, first_spilled = MAKERS[setup.optimizer](engine.optim_parameters()), 0
        for step in range(STEPS):
            if step == STEPS // 2:
                for device in engine.devices:
                    device.capacity.peak = device.capacity.used
            engine.forward_backward((), inputs, loss_fn=lambda output, _: output.loss)
            if step == 0:
                first_spilled = engine.statistics()["spill_bytes"]
            engine.step(optimizer.step, setup.is_async)
            # Because a slow machine's update may still read gradients when the next ones come.
            engine.synchronize()
        return Measured(
            max(device.capacity.peak for device in engine.devices),
            _host_bytes(engine, optimizer, first_spilled, is_async=setup.is_async),
        )


def _plan_of(stages: tuple[tuple[int, ...], tuple[int, ...]]) -> ModelExecutePlan:
    """Backward stages are listed deepest first."""
    forward, backward = stages
    ahead, end = list[range](), 0
    for count in forward:
        ahead, end = [*ahead, range(end, end + count)], end + count
    back, end = list[range](), sum(backward)
    for count in backward:
        back, end = [*back, range(end - count, end)], end - count
    return ModelExecutePlan(ahead, back)


def _host_bytes(
    engine: Any, optimizer: torch.optim.Optimizer, first_spilled: int, *, is_async: bool
) -> dict[str, int]:
    """``first_spilled``: after the first call, which counts beside what there was then."""
    said = engine.statistics()
    moments = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    # Whatever was ever made is kept, so what is free now is the most there was.
    kept = [buffer for free in engine._host.buffers._free.values() for buffer in free]
    weights = [
        weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
        for weight in engine.model.parameters()
    ]
    found = {
        "weights": sum(weights),
        "masters": said["master_bytes"],
        "moments": sum(tensor.nbytes for tensor in moments),
        "gradients": sum(t.nbytes for buffer in kept for t in buffer.tensors.values()),
        "second_buffer": said["second_buffer_bytes"],
    }
    trained = sum(weight.nbytes for weight in engine.model.parameters() if weight.requires_grad)
    # On a GPU an asynchronous update begins while the call's backward runs still.
    later = 0 if is_async else found["moments"] + found["gradients"] - trained
    return found | {"spilled": max(said["spill_bytes"], first_spilled - later)}


def measure_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds instead of ten seconds, and a megabyte instead of one and a half gigabytes."""
    for name, value in {
        "_SECONDS": 1e-3,
        "_ROUND_SECONDS": 1e-3,
        "_COPIED_BYTES": 1 << 20,
        "_MATRIX_ON_CPU": 64,
        "_ELEMENTS": 1 << 14,
        "_MOST_WEIGHTS": 2,
    }.items():
        monkeypatch.setattr(measure, name, value)
