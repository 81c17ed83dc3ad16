"""Staleness is exactly one step however fast or slow the optimizer is; a flush is a synchronisation
point."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from roundpipe import OptimizerCtx, RoundPipe
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, reference_steps, run_batch, train_steps
from tests.support.models import MLP, make_mlp, mlp_batch
from tests.support.optimizers import PATIENCE_S, Gate, PausingSGD, random_delays
from tests.support.reference import Reference

STEPS = 8
BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(STEPS)]


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def slow_sgd(engine: RoundPipe, pause: Callable[[], None]) -> PausingSGD:
    return PausingSGD(engine.optim_parameters(), pause=pause, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_in_the_optimizer_change_nothing(
    seed: int, devices: DeviceSet, engines: Engines
) -> None:
    reference = Reference(make_mlp(), sgd, staleness=1)
    expected = reference_steps(reference, BATCHES, 2)
    engine = engines(make_mlp(), devices)
    losses = train_steps(engine, slow_sgd(engine, random_delays(seed)), BATCHES, 2, is_async=True)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


def test_random_delays_change_nothing_in_synchronous_steps(
    devices: DeviceSet, engines: Engines
) -> None:
    reference = Reference(make_mlp(), sgd)
    expected = reference_steps(reference, BATCHES, 2)
    engine = engines(make_mlp(), devices)
    losses = train_steps(engine, slow_sgd(engine, random_delays(7)), BATCHES, 2, is_async=False)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


def test_the_fastest_optimizer_is_as_stale_as_the_slowest(
    devices: DeviceSet, engines: Engines
) -> None:
    """Every update is over before the next call starts; the call must still not use it before its
    time."""
    reference = Reference(make_mlp(), sgd, staleness=1)
    expected = reference_steps(reference, BATCHES, 2)
    engine = engines(make_mlp(), devices)
    optimizer = sgd(engine.optim_parameters())
    losses = []
    for batch in BATCHES:
        losses.append(run_batch(engine, batch, 2))
        done = threading.Event()

        def step_fn(done: threading.Event = done) -> None:
            optimizer.step()
            optimizer.zero_grad()
            done.set()

        engine.step(step_fn)
        assert done.wait(PATIENCE_S)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


def test_the_next_call_runs_while_the_update_is_held_up(
    devices: DeviceSet, engines: Engines
) -> None:
    """Asynchronous means it: `step` and the whole next `forward_backward` return with the update
    still to come."""
    reference = Reference(make_mlp(), sgd, staleness=1)
    expected = reference_steps(reference, BATCHES[:2], 2)
    engine = engines(make_mlp(), devices)
    gate = Gate()
    optimizer = slow_sgd(engine, gate.pause)
    losses = [run_batch(engine, BATCHES[0], 2)]
    handle = engine.step(optimizer.step)
    gate.wait_reached()
    losses.append(run_batch(engine, BATCHES[1], 2))
    gate.open()
    handle.wait()
    engine.step(optimizer.step)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


class WithMethod(nn.Sequential):
    """A model with a method that reads its weights, as `save_pretrained` and `generate` do."""

    def snapshot(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}


def read_by_forward(engine: RoundPipe) -> dict[str, torch.Tensor]:
    """Weights as a no-grad forward sees them: the images of the unit vectors say all there is to
    say of the output."""
    with torch.no_grad():
        return {"images": engine(torch.eye(16))}


def named_copies(engine: RoundPipe) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.named_parameters()}


READS: dict[str, Callable[[RoundPipe], dict[str, torch.Tensor]]] = {
    "synchronize": engine_weights,
    "state_dict": lambda engine: {
        name: value.clone() for name, value in engine.state_dict().items()
    },
    "named_parameters": named_copies,
    "parameters": lambda engine: dict(
        zip(
            dict(engine.model.named_parameters()),
            [p.detach().clone() for p in engine.parameters()],
            strict=True,
        )
    ),
    "no_grad forward": read_by_forward,
    "method of the model": lambda engine: engine.snapshot(),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_in_the_middle_sees_every_update_and_synchronises(
    read: str, devices: DeviceSet, engines: Engines
) -> None:
    """Right after step k the newest weights are W_k, and the next gradient is computed at W_k
    too."""
    model = WithMethod(*make_mlp())
    reference = Reference(model, sgd, staleness=1)
    engine = engines(model, devices)
    optimizer = slow_sgd(engine, random_delays(3))
    for index, batch in enumerate(BATCHES):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 2)
        engine.step(optimizer.step)
        if index in (2, 5):
            seen = READS[read](engine)
            reference.flush()
            expected = reference.weights
            if read == "no_grad forward":
                plain = WithMethod(*make_mlp())
                plain.load_state_dict(expected)
                # The engine's default cut of 16 rows; products of other row counts may round
                # differently.
                devices.check(seen, {"images": plain(torch.eye(16))}, bitwise=False)
            else:
                devices.check(seen, expected)
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_hyper_parameters_are_those_of_the_call(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    """The scheduler moves right after `step`, while a slow update is still on its way, in two
    groups."""

    def make_groups(named: list[tuple[str, torch.Tensor]]) -> list[dict[str, object]]:
        weights = [p for name, p in named if name.endswith("weight")]
        biases = [p for name, p in named if name.endswith("bias")]
        return [{"params": weights, "lr": 0.1, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    model = make_mlp()
    names = [name for name, _ in model.named_parameters()]
    reference = Reference(
        model,
        lambda params: torch.optim.SGD(
            make_groups(list(zip(names, params, strict=True))), momentum=0.9
        ),
        staleness=int(is_async),
    )
    reference_schedule = schedule(reference.optimizer)
    engine = engines(model, devices)
    optimizer = PausingSGD(
        make_groups(list(engine.optim_named_parameters())),
        pause=random_delays(11),
        lr=1.0,
        momentum=0.9,
    )
    engine_schedule = schedule(optimizer)
    for batch in BATCHES:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        reference_schedule.step()
        run_batch(engine, batch, 2)
        engine.step(optimizer.step, is_async=is_async)
        engine_schedule.step()
    devices.check(engine_weights(engine), reference.weights)
    assert [group["lr"] for group in optimizer.param_groups] == [
        group["lr"] for group in reference.optimizer.param_groups
    ]


class Pair:
    """Two optimizers stepped one after the other, as models with special embeddings use them."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.both = (first, second)

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.step()
            optimizer.zero_grad()

    def set_lr(self, lr: float) -> None:
        for optimizer in self.both:
            optimizer.param_groups[0]["lr"] = lr


def test_two_optimizers_in_one_step_fn_both_keep_the_hyper_parameters_of_the_call(
    devices: DeviceSet, engines: Engines
) -> None:
    """From the very first step on, though the second is entered only after the slow first one."""
    reference = Reference(
        make_mlp(),
        lambda params: Pair(torch.optim.SGD(params[:4], lr=0.1), sgd(params[4:])),
        staleness=1,
    )
    engine = engines(make_mlp(), devices)
    masters = engine.optim_parameters()
    pair = Pair(
        PausingSGD(masters[:4], pause=lambda: time.sleep(0.01), lr=0.1),
        PausingSGD(masters[4:], pause=random_delays(17), lr=0.1, momentum=0.9),
    )
    for index, batch in enumerate(BATCHES):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        reference.optimizer.set_lr(0.1 / (2 + index))
        run_batch(engine, batch, 2)
        engine.step(pair.step)
        pair.set_lr(0.1 / (2 + index))
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_ownership_of_the_gradients_passes_at_the_call(
    devices: DeviceSet, engines: Engines
) -> None:
    """`zero_grad()` right behind an asynchronous `step` drops nothing that was stepped."""
    reference = Reference(make_mlp(), sgd, staleness=1)
    reference_steps(reference, BATCHES, 2)
    engine = engines(make_mlp(), devices)
    optimizer = slow_sgd(engine, random_delays(5))
    for batch in BATCHES:
        run_batch(engine, batch, 2)
        engine.step(optimizer.step)
        engine.zero_grad()
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_torch_clipping_inside_step_fn_sees_masters_with_their_gradients(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    reference = Reference(make_mlp(), sgd, staleness=int(is_async))
    engine = engines(make_mlp(), devices)
    optimizer = sgd(engine.optim_parameters())
    expected, norms = [], []

    def step_fn() -> None:
        norms.append(torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()

    for batch in BATCHES:
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step(lambda params: expected.append(torch.nn.utils.clip_grad_norm_(params, 0.05)))
        run_batch(engine, batch, 2)
        engine.step(step_fn, is_async=is_async)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)
    devices.check(torch.stack(norms), torch.stack(expected), bitwise=False)
    assert min(float(norm) for norm in expected) > 0.05, (
        "nothing was clipped, so nothing was tested"
    )


def test_a_step_hands_over_its_arguments_and_result(engines: Engines) -> None:
    engine = engines(make_mlp(), TWO)
    optimizer = sgd(engine.optim_parameters())

    def step_fn(factor: float, *, offset: float) -> float:
        optimizer.step()
        optimizer.zero_grad()
        return 2 * factor + offset

    for is_async in (False, True):
        run_batch(engine, BATCHES[0], 2)
        handle = engine.step(step_fn, is_async, 3.0, offset=1.0)
        handle.wait()
        assert handle.result() == 7.0


def test_zero_grad_inside_step_fn_is_harmless(engines: Engines) -> None:
    """What every ordinary training loop writes next to `optimizer.step()`."""
    reference = Reference(make_mlp(), sgd, staleness=1)
    reference_steps(reference, BATCHES, 2)
    engine = engines(make_mlp(), TWO)
    optimizer = sgd(engine.optim_parameters())

    def step_fn() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for batch in BATCHES:
        run_batch(engine, batch, 2)
        engine.step(step_fn)
    TWO.check(engine_weights(engine), reference.weights)


def test_the_optimizer_context_waits_for_the_update_and_shows_the_masters(engines: Engines) -> None:
    reference = Reference(make_mlp(), sgd, staleness=1)
    reference_steps(reference, BATCHES[:3], 2)
    engine = engines(MLP.make(), TWO)
    train_steps(engine, slow_sgd(engine, random_delays(13)), BATCHES[:3], 2, is_async=True)
    with OptimizerCtx():
        masters = dict(engine.named_parameters())
        TWO.check(masters, reference.weights)
    assert [id(p) for p in masters.values()] == [id(p) for p in engine.optim_parameters()]
