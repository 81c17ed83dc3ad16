"""An offloaded optimizer that read its hyper-parameters late, or a copy of them made too early.

The usual two groups (decay for weights, none for norms), a scheduler that moves right after `step`
while the update may still be in flight; then the optimizer's own state loaded back, which replaces
its groups by new dictionaries; then a group added. Each update must use the values its own step was
called with.

Source: deepspeedai/DeepSpeed#7905, pytorch/ao#959, NVIDIA/apex#766.
"""

from typing import Any

import pytest
import torch

import roundpipe
from tests.support.device_sets import THREE
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import LLAMA, make_llama
from tests.support.optimizers import random_delays
from tests.support.reference import Reference

BATCHES = [LLAMA.batch(4, seed) for seed in range(11)]
HELD_BACK = "lm_head.weight"


def groups(named: list[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    usual = [(name, p) for name, p in named if name != HELD_BACK]
    return [
        {"params": [p for name, p in usual if "norm" not in name], "lr": 0.1, "weight_decay": 0.1},
        {"params": [p for name, p in usual if "norm" in name], "lr": 0.01, "weight_decay": 0.0},
    ]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 / (1 + step))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("own", [True, False], ids=["ours", "torch's"])
def test_every_update_uses_the_hyper_parameters_of_its_own_step(
    own: bool, is_async: bool, engines: Engines
) -> None:
    model = make_llama(tied=False)
    names = [name for name, _ in model.named_parameters()]
    reference = Reference(
        model,
        lambda params: torch.optim.AdamW(groups(list(zip(names, params, strict=True))), fused=True),
        staleness=int(is_async),
    )
    engine = engines(model, THREE)
    named = engine.optim_named_parameters()
    optimizer = (roundpipe.optim.AdamW if own else torch.optim.AdamW)(groups(named), fused=True)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedules = [schedule(optimizer), schedule(reference.optimizer)]
    pause = random_delays(4)

    def step_fn() -> None:
        pause()
        optimizer.step()
        for _, master in named:  # of those too that are in no group yet, as the oracle does
            master.grad = None

    def train(batches: list[Any]) -> None:
        for batch in batches:
            reference.forward_backward(batch.split(2), batch.loss_fn)
            reference.step()
            run_batch(engine, batch, 2)
            engine.step(step_fn, is_async=is_async)
            for each in schedules:
                each.step()

    train(BATCHES[:6])
    for each in (optimizer, reference.optimizer):
        with (
            roundpipe.OptimizerCtx()
        ):  # torch's own `state_dict` does not wait for the update in flight
            each.load_state_dict(each.state_dict())
    train(BATCHES[6:9])
    extra = {"lr": 0.02, "weight_decay": 0.3}
    for each, masters in ((optimizer, named), (reference.optimizer, reference_masters(reference))):
        with roundpipe.OptimizerCtx():
            each.add_param_group({"params": [dict(masters)[HELD_BACK]], **extra})
    schedules[:] = []
    train(BATCHES[9:])
    THREE.check(engine_weights(engine), reference.weights, bitwise=False)


def reference_masters(reference: Reference) -> list[tuple[str, torch.Tensor]]:
    return list(reference._masters.named_parameters())
