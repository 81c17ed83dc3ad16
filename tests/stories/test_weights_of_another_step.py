"""A checkpoint of weights that live on the host held the values of another step than the one asked
for.

With stale gradients and updates on their way "the current weights" has two meanings, and code paths
picked different ones. Here every way of reading, taken at once after step k and with a slow
optimizer, gives W_k; what torch calls a copy (a file, a deepcopy, a clone) does not change when
training goes on.

Source: pytorch/pytorch#144657, NVIDIA-NeMo/RL#3312.
"""

import copy
import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from roundpipe import RoundPipe, save_checkpoint
from tests.support.device_sets import TWO
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import LLAMA, make_mlp, mlp_batch
from tests.support.reference import Reference, Tensors, weights_of

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(7)]


def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class SlowAdamW(torch.optim.AdamW):
    def step(self, closure: None = None) -> None:
        time.sleep(0.01)
        super().step(closure)
        time.sleep(0.01)


def to_file_and_back(engine: RoundPipe) -> Tensors:
    file = io.BytesIO()
    torch.save(engine.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def deep_copy(engine: RoundPipe) -> Tensors:
    engine.synchronize()
    return weights_of(copy.deepcopy(engine.model))


COPIES: dict[str, Callable[[RoundPipe], Tensors]] = {
    "file": to_file_and_back,
    "deepcopy": deep_copy,
    "state_dict, cloned": lambda engine: {
        name: value.clone() for name, value in engine.state_dict().items()
    },
    "parameters, cloned": lambda engine: {
        name: p.detach().clone() for name, p in engine.named_parameters()
    },
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("take", COPIES)
def test_what_is_taken_after_step_k_is_w_k_and_stays(
    take: str, slow: bool, is_async: bool, engines: Engines
) -> None:
    """Taken after steps 3 and 5, compared at the end. Reading is a synchronisation point for the
    reference too."""
    model = make_mlp()
    reference = Reference(model, adamw, staleness=int(is_async))
    engine = engines(model, TWO)
    optimizer = (SlowAdamW if slow else torch.optim.AdamW)(engine.optim_parameters(), lr=0.01)
    taken, expected = [], []
    for step, batch in enumerate(BATCHES, start=1):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 2)
        engine.step(optimizer.step, is_async=is_async)
        if step in (3, 5):
            taken.append(COPIES[take](engine))
            expected.append(reference.weights)
            reference.flush()
    TWO.check(engine_weights(engine), reference.weights)
    for copied, right in zip(taken, expected, strict=True):
        TWO.check(copied, right)
    assert not torch.equal(taken[0]["0.weight"], taken[1]["0.weight"])


def test_save_pretrained_right_after_a_slow_step_writes_the_new_weights(
    tmp_path: Path, engines: Engines
) -> None:
    """Reached through the engine, it flushes first; the file is what plain transformers reads."""
    from transformers import LlamaForCausalLM

    model = LLAMA.make()
    engine = engines(model, TWO)
    reference = Reference(model, adamw)
    optimizer = SlowAdamW(engine.optim_parameters(), lr=0.01)
    batch = LLAMA.batch(4, 0)
    reference.forward_backward(batch.split(2), batch.loss_fn)
    reference.step()
    run_batch(engine, batch, 2)
    engine.step(optimizer.step)
    engine.save_pretrained(tmp_path)
    TWO.check(weights_of(LlamaForCausalLM.from_pretrained(tmp_path)), reference.weights)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_successive_checkpoints_hold_their_own_step_and_never_change(
    is_async: bool, tmp_path: Path, engines: Engines
) -> None:
    """Masters and step counters as well as weights; each taken at once behind a slow step, compared
    at the end."""
    reference = Reference(
        make_mlp().bfloat16(), adamw, staleness=int(is_async), optim_dtype=torch.float32
    )
    engine = engines(make_mlp().bfloat16(), TWO, optim_dtype=torch.float32)
    optimizer = SlowAdamW(engine.optim_parameters(), lr=0.01)
    expected = {}
    for step, batch in enumerate(BATCHES, start=1):
        batch = batch._replace(
            args=(batch.args[0].bfloat16(),),
            loss_fn=lambda out, target, of=batch.loss_fn: of(out.float(), target),
        )
        reference.forward_backward(batch.split(1), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 1)
        engine.step(optimizer.step, is_async=is_async)
        if step in (2, 3, 5):
            save_checkpoint(tmp_path / str(step), engine, optimizer)
            expected[step] = reference.weights
            reference.flush()
    for step, weights in expected.items():
        saved = load_file(tmp_path / str(step))
        TWO.check({name: saved[f"master/{name}"] for name in weights}, weights)
        TWO.check(
            {name: saved[f"model/{name}"] for name in weights},
            {n: w.bfloat16() for n, w in weights.items()},
        )
        assert {float(saved[f"optimizer/{name}/step"]) for name in weights} == {float(step)}
    assert not torch.equal(expected[2]["0.weight"], expected[3]["0.weight"])
