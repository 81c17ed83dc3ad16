"""An fp16 base with adapters and the fp16 flag ended in "Attempting to unscale FP16 gradients".

What the scaler sees are masters: fp32 ones work whatever the weights are, fp16 ones are refused at
the first step with their dtype in the message, and frozen fp16 weights have no master at all.

Source: huggingface/peft#1249, peft#1706, haotian-liu/LLaVA#363.
"""

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, GradScaler
from tests.support.device_sets import TWO
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import llama_batch, make_llama, make_lora_llama
from tests.support.reference import Reference, weights_of

BATCHES = [llama_batch([12, 9, 5, 11], seed) for seed in range(3)]
FP16 = {"device_type": "cpu", "dtype": torch.float16}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fp16_base(adapter: torch.dtype) -> nn.Module:
    model = make_lora_llama().half()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(adapter)
    return model


def train(engine: roundpipe.RoundPipe) -> None:
    optimizer, scaler = sgd(engine.optim_parameters()), GradScaler(init_scale=256.0)

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        roundpipe.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        optimizer.zero_grad()

    for batch in BATCHES:
        run_batch(
            engine, batch._replace(loss_fn=lambda o, t, b=batch: scaler.scale(b.loss_fn(o, t))), 2
        )
        engine.step(step_fn, is_async=False)
        scaler.update()


def assert_moved_alike(
    actual: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]
) -> None:
    """The updates, all together, agree to 1 %; what is frozen did not move."""
    updates = [
        torch.cat([(weights[name] - start[name]).float().flatten() for name in sorted(start)])
        for weights in (actual, expected)
    ]
    assert updates[1].norm() > 0
    assert (updates[0] - updates[1]).norm() < 1e-2 * updates[1].norm()
    for name, value in start.items():
        if "lora" not in name and any("lora" in key for key in start):
            assert torch.equal(actual[name], value)


def test_fp32_adapters_on_an_fp16_base_match_a_plain_autocast_run(engines: Engines) -> None:
    plain, theirs = fp16_base(torch.float32), torch.amp.GradScaler("cpu", init_scale=256.0)
    start = weights_of(plain)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = sgd(trained)
    for batch in BATCHES:
        for args, kwargs, label in batch.split(2):
            with torch.autocast(**FP16):
                loss = batch.loss_fn(plain(*args, **kwargs), label)
            theirs.scale(loss).backward()
        theirs.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
    engine = engines(fp16_base(torch.float32), TWO)
    with torch.autocast(**FP16):
        train(engine)
    assert_moved_alike(engine_weights(engine), weights_of(plain), start)


@pytest.mark.parametrize("whole", [False, True], ids=["fp16 adapters", "full fine-tune"])
def test_fp16_weights_train_through_fp32_masters(whole: bool, engines: Engines) -> None:
    """Against the written reference, whose loss is scaled by the same constant."""

    def make() -> nn.Module:
        return make_llama(tied=False).half() if whole else fp16_base(torch.float16)

    reference = Reference(make(), sgd, optim_dtype=torch.float32)
    start = weights_of(make())

    def unscale_and_clip(params: Any) -> None:
        for parameter in params:
            parameter.grad.div_(256.0)
        torch.nn.utils.clip_grad_norm_(params, 0.5)

    for batch in BATCHES:
        reference.forward_backward(batch.split(2), lambda o, t, b=batch: 256.0 * b.loss_fn(o, t))
        reference.step(unscale_and_clip)
    engine = engines(make(), TWO, optim_dtype=torch.float32)
    train(engine)
    masters = {name: master.detach().clone() for name, master in engine.optim_named_parameters()}
    expected = {name: value for name, value in reference.weights.items() if name in masters}
    assert_moved_alike(masters, expected, {name: start[name] for name in masters})


@pytest.mark.parametrize("whole", [False, True], ids=["fp16 adapters", "full fine-tune"])
def test_fp16_masters_are_refused_at_the_first_step(whole: bool, engines: Engines) -> None:
    model = make_llama(tied=False).half() if whole else fp16_base(torch.float16)
    start = weights_of(model)
    engine = engines(model, TWO)
    with pytest.raises(ConfigError, match="is torch.float16.*pass optim_dtype=torch.float32"):
        train(engine)
    TWO.check(engine_weights(engine), start)
