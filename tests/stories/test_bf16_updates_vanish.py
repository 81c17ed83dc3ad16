"""In bf16 training, norm weights stayed exactly 1.0 for the whole run and small gradients vanished
in the sum.

With fp32 masters neither may happen: updates far below bf16's resolution add up in the masters, and
gradients of many microbatches or calls are summed in fp32 and rounded once.

Source: vllm-project/speculators#765, deepspeedai/DeepSpeed#2352.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import Engines, run_batch
from tests.support.models import Batch, llama_batch, make_llama
from tests.support.reference import Microbatch, Reference, plain_call

STEPS, MICROBATCHES, VALUE = 12, 256, 1e-3


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0)


def norms_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: value.detach().float().clone() for name, value in weights.items() if "norm" in name
    }


def test_norm_weights_leave_one_as_in_fp32(engines: Engines) -> None:
    """The reference is fed the same gradients of a bf16 forward and keeps fp32 weights."""
    model = make_llama(tied=False).bfloat16()
    reference = Reference(model, adamw, optim_dtype=torch.float32, grad_dtype=torch.bfloat16)
    engine = engines(model, TWO, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-4, weight_decay=0.0)
    for seed in range(STEPS):
        batch = llama_batch([12, 9, 5, 11], seed % 5)
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 2)
        engine.step(optimizer.step, is_async=False)
    with roundpipe.OptimizerCtx():
        masters = norms_of(dict(engine.named_parameters()))
    expected = norms_of(reference.weights)
    assert masters
    for name, master in masters.items():
        assert (master - 1).abs().max() > 1e-4, f"{name} has hardly moved"
        torch.testing.assert_close(master, expected[name], rtol=1e-3, atol=0)


def test_the_oracle_would_have_caught_bf16_masters() -> None:
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(STEPS):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weight, torch.ones(8, dtype=torch.bfloat16))


def tiny_gradients(rows: int) -> tuple[nn.Sequential, Batch]:
    """Every row adds the same tiny gradient to the one weight."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).bfloat16()
    inputs = torch.full((rows, 4), VALUE, dtype=torch.bfloat16)
    return model, Batch((inputs,), {}, None, lambda outputs, _: outputs.sum())


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("as_calls", [False, True], ids=["microbatches", "calls"])
def test_tiny_gradients_of_many_microbatches_add_up(
    as_calls: bool, grad_dtype: torch.dtype | None, devices: DeviceSet, engines: Engines
) -> None:
    rounds, rows = (MICROBATCHES, 1) if as_calls else (1, MICROBATCHES)
    model, batch = tiny_gradients(rows)
    expected = float(torch.tensor(VALUE).bfloat16()) * MICROBATCHES
    engine = engines(model, devices, optim_dtype=torch.float32, grad_dtype=grad_dtype)
    masters = list(engine.optim_parameters())
    for _ in range(rounds):
        run_batch(engine, batch, rows)
    seen = engine.step(lambda: masters[0].grad.clone(), is_async=False).result()
    assert seen.dtype is torch.float32
    tolerance = 1e-3 if grad_dtype is torch.float32 else 4e-3
    torch.testing.assert_close(seen, torch.full((4, 4), expected), rtol=tolerance, atol=0)


def test_sums_in_bf16_would_have_lost_more() -> None:
    model, batch = tiny_gradients(MICROBATCHES)
    total = torch.zeros(4, 4, dtype=torch.bfloat16)
    for row in batch.args[0].split(1):
        total += (
            plain_call(model, [Microbatch((row,), {}, None)], batch.loss_fn)
            .gradients["0.weight"]
            .bfloat16()
        )
    expected = float(torch.tensor(VALUE).bfloat16()) * MICROBATCHES
    assert abs(float(total[0, 0]) / expected - 1) > 4e-3
