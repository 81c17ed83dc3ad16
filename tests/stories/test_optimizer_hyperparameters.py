"""Optimizers stepped with other hyper-parameters than those they had when `step` was called, or
with other rules.

`roundpipe.optim.Adam(decoupled_weight_decay=True)` decayed as Adam does by default. An optimizer
made after the first step was not known to the engine, which so read its learning rate when the
update ran instead of when it was asked for. And a gradient that `step_fn` had kept, for a log,
changed when the next call offloaded its own in the same memory.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import roundpipe
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch, train_steps
from tests.support.models import make_mlp, mlp_batch
from tests.support.optimizers import Gate
from tests.support.reference import Reference, plain_call

BATCH = mlp_batch(rows=6)
BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(3)]
KINDS = ["SGD", "Adam", "AdamW"]


def maker(
    module: Any, kind: str, **settings: Any
) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    def make(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return getattr(module, kind)(params, **settings)

    return make


@pytest.mark.parametrize("is_decoupled", [False, True], ids=["coupled", "decoupled"])
def test_adam_decays_weights_as_it_is_told(
    is_decoupled: bool, devices: DeviceSet, engines: Engines
) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.5}
    model = make_mlp()
    reference = Reference(
        model, maker(torch.optim, "Adam", decoupled_weight_decay=is_decoupled, **settings)
    )
    other = Reference(
        model, maker(torch.optim, "Adam", decoupled_weight_decay=not is_decoupled, **settings)
    )
    for each in (reference, other):
        for batch in BATCHES:
            each.forward_backward(batch.split(2), batch.loss_fn)
            each.step()
    assert not torch.allclose(
        reference.weights["0.weight"], other.weights["0.weight"], rtol=1e-2, atol=1e-3
    )
    engine = engines(model, devices)
    make = maker(roundpipe.optim, "Adam", decoupled_weight_decay=is_decoupled, **settings)
    train_steps(engine, make(engine.optim_parameters()), BATCHES, 2, is_async=False)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_made_later_keeps_the_hyper_parameters_of_the_call(
    kind: str, devices: DeviceSet, engines: Engines
) -> None:
    """The update is held up until the caller has changed the learning rate, which must not
    count."""
    model = make_mlp()
    reference = Reference(model, maker(torch.optim, "SGD", lr=0.1))
    reference.forward_backward(BATCH.split(2), BATCH.loss_fn)
    reference.step()
    engine = engines(model, devices)
    first = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    train_steps(engine, first, [BATCH], 2, is_async=True)
    engine.synchronize()
    devices.check(engine_weights(engine), reference.weights, bitwise=False)
    before = engine_weights(engine)

    later = maker(roundpipe.optim, kind, lr=0.0, weight_decay=0.0)(engine.optim_parameters())
    gate = Gate()

    def step_fn() -> None:
        gate.pause()
        later.step()
        later.zero_grad()

    run_batch(engine, BATCH, 2)
    engine.step(step_fn)
    gate.wait_reached()
    for group in later.param_groups:
        group["lr"] = 1.0
    gate.open()
    devices.check(engine_weights(engine), before)
    # and from the next call on it does count
    run_batch(engine, BATCH, 2)
    engine.step(later.step)
    assert not torch.equal(engine_weights(engine)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_gradient_kept_by_step_fn_stays_what_it_was(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    engine = engines(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.0)
    expected = [
        plain_call(make_mlp(), batch.split(2), batch.loss_fn).gradients for batch in BATCHES
    ]
    names = [name for name, _ in engine.optim_named_parameters()]

    def step_fn() -> dict[str, Tensor]:
        optimizer.step()
        masters = [master for group in optimizer.param_groups for master in group["params"]]
        seen = {name: master.grad for name, master in zip(names, masters, strict=True)}
        optimizer.zero_grad()
        return seen

    kept = []
    for batch in BATCHES:
        run_batch(engine, batch, 2)
        kept.append(engine.step(step_fn, is_async=is_async))
    engine.synchronize()
    for handle, gradients in zip(kept, expected, strict=True):
        devices.check(handle.result(), gradients)
