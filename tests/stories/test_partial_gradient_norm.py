"""A gradient norm over one stage, or over scaled gradients, instead of the whole model.

The logged norm must be the plain model's, computed after unscaling and before clipping, with a tied
weight counted once; and the clipped training must go where the plain one goes. Through the Trainer
the same is tested in tests/hf.

Source: pytorch/torchtitan#596, huggingface/transformers#40799, pytorch/pytorch#148532.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import GradScaler, ModelExecutePlan
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import LLAMA, LLAMA_VOCABULARY, Batch, ModelCase
from tests.support.reference import Reference

LIMIT, SCALE = 0.5, 1024.0


def make_gpt2() -> nn.Module:
    """TinyGPT-2, tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=LLAMA_VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0,
        embd_pdrop=0,
    )
    config.attn_pdrop = 0
    return GPT2LMHeadModel(config)


CASES = [LLAMA, ModelCase(name="gpt2-tied", make=make_gpt2, batch=LLAMA.batch, tied=True)]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Not Adam, which makes steps of full size from the rounding noise that is GPT-2's gradient of
    a key bias."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def stages(num_layers: int) -> ModelExecutePlan:
    """A stage for each layer."""
    each = [range(layer, layer + 1) for layer in range(num_layers)]
    return ModelExecutePlan(fwd_plan=each[:-1], bwd_plan=each[::-1])


@pytest.mark.parametrize("scale", [None, SCALE], ids=["plain", "scaled"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_norm_is_the_whole_models(
    case: ModelCase, scale: float | None, devices: DeviceSet, engines: Engines
) -> None:
    scaler = GradScaler(init_scale=scale or 1.0, enabled=scale is not None)
    reference = Reference(case.make(), sgd)
    engine = engines(case.make(), devices)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1, momentum=0.9)
    plan = stages(engine.execute_plan.bwd_plan[0].stop)
    norms, expected = [], []

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        norms.append(roundpipe.clip_grad_norm_(engine, LIMIT))
        scaler.step(optimizer)
        optimizer.zero_grad()

    for seed in range(3):
        batch = case.batch(4, seed)
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step(
            lambda params: expected.append(torch.nn.utils.clip_grad_norm_(params, LIMIT))
        )
        run_batch(engine, times(batch, scaler), 2, execute_plan=plan)
        engine.step(step_fn, is_async=False)
        scaler.update()
    torch.testing.assert_close(torch.stack(norms), torch.stack(expected), rtol=1e-5, atol=0)
    assert min(map(float, expected)) > LIMIT, "nothing was clipped"
    devices.check(engine_weights(engine), reference.weights, bitwise=False)


def times(batch: Batch, scaler: GradScaler) -> Batch:
    loss_fn = batch.loss_fn
    return batch._replace(loss_fn=lambda outputs, labels: scaler.scale(loss_fn(outputs, labels)))


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_an_inf_anywhere_shows_in_the_norm_and_does_what_torch_does(
    layer: int, devices: DeviceSet, engines: Engines
) -> None:
    """Without a scaler: the norm is inf, every gradient becomes 0 or NaN, nothing is clipped by
    half."""
    model, plain = LLAMA.make(), LLAMA.make()
    batch = LLAMA.batch(4, 0)
    engine = engines(model, devices)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=1.0)
    run_batch(engine, batch, 2)
    names = [name for name, _ in engine.optim_named_parameters()]
    poisoned = names[layer * len(names) // 6]

    def step_fn() -> float:
        dict(engine.named_parameters())[poisoned].grad[0] = math.inf
        norm = roundpipe.clip_grad_norm_(engine, LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    norm = engine.step(step_fn, is_async=False).result()
    batch.loss_fn(plain(*batch.args, **batch.kwargs), batch.label).backward()
    dict(plain.named_parameters())[poisoned].grad[0] = math.inf
    assert norm == float(torch.nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)) == math.inf
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    engine.synchronize()
    for name, parameter in plain.named_parameters():
        ours = dict(model.named_parameters())[name]
        torch.testing.assert_close(ours, parameter, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_oracle_tells_parts_from_the_whole() -> None:
    """One layer's norm is far from the model's."""
    model, batch = LLAMA.make(), LLAMA.batch(4, 0)
    batch.loss_fn(model(*batch.args, **batch.kwargs), batch.label).backward()
    whole = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    layers = [
        float(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()]))
        for layer in model.model.layers
    ]
    assert max(layers) < 0.7 * whole
