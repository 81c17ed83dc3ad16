"""An offloaded optimizer without the barrier the next forward needs.

Weights or gradient buffers were read half-updated; with a fast optimizer nobody noticed. Here the
optimizer is slowed down before and after it writes, always, at every third step, or not at all, and
the next call starts at once. All runs must agree to the bit with each other and with the written
reference: R1 when asynchronous, R0 when not.

Source: pytorch/ao#1649, deepspeedai/DeepSpeed#8061.
"""

import time
from collections.abc import Callable

import pytest
import torch

from roundpipe import RoundPipe
from tests.support.device_sets import DeviceSet
from tests.support.engines import (
    Engines,
    engine_gradients,
    engine_weights,
    reference_steps,
    run_batch,
    train_steps,
)
from tests.support.models import make_mlp, mlp_batch
from tests.support.optimizers import PausingSGD, every_third, random_delays
from tests.support.reference import Reference, plain_call

WIDTH = 64
BATCHES = [mlp_batch(rows=8, seed=seed, width=WIDTH) for seed in range(12)]
PAUSES: dict[str, Callable[[], Callable[[], None]]] = {
    "as it is": lambda: lambda: None,
    "always slow": lambda: lambda: time.sleep(0.008),
    "every third slow": every_third,
    "slow at random": lambda: random_delays(2),
}


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def slowed(engine: RoundPipe, pause: str) -> PausingSGD:
    return PausingSGD(engine.optim_parameters(), pause=PAUSES[pause](), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("pause", PAUSES)
def test_speed_of_the_optimizer_does_not_matter(
    pause: str, is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp(width=WIDTH)
    reference = Reference(model, sgd, staleness=int(is_async))
    expected = reference_steps(reference, BATCHES, 2)
    engine = engines(model, devices)
    losses = train_steps(engine, slowed(engine, pause), BATCHES, 2, is_async=is_async)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


def test_a_slow_update_consumes_the_gradients_of_its_own_step(
    devices: DeviceSet, engines: Engines
) -> None:
    """The gradients are recorded inside the slow `step`, after the next call's may already have
    begun to offload."""
    seen: list[dict[str, torch.Tensor]] = []

    class Recording(PausingSGD):
        def step(self, closure: None = None) -> None:
            super().step(closure)
            seen.append(
                {name: master.grad.clone() for name, master in zip(names, masters, strict=True)}
            )

    model = make_mlp(width=WIDTH)
    names = [name for name, _ in model.named_parameters()]
    engine = engines(model, devices)
    masters = list(engine.optim_parameters())
    # Learning rate 0: every gradient is taken at the same weights, so the plain gradients are known
    # beforehand.
    optimizer = Recording(masters, pause=PAUSES["always slow"](), lr=0.0)
    train_steps(engine, optimizer, BATCHES[:6], 2, is_async=True)
    engine.synchronize()
    for batch, gradients in zip(BATCHES, seen, strict=False):
        expected = plain_call(make_mlp(width=WIDTH), batch.split(2), batch.loss_fn).gradients
        devices.check(gradients, expected)
    assert len(seen) == 6


def test_gradients_read_while_an_update_is_on_its_way_are_the_new_ones(
    devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp(width=WIDTH)
    reference = Reference(model, sgd, staleness=1)
    engine = engines(model, devices)
    optimizer = slowed(engine, "always slow")
    for batch in BATCHES[:4]:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2)
        devices.check(engine_gradients(engine), reference.gradients)
        reference.flush()
        reference.step()
        engine.step(optimizer.step)
