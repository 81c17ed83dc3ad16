"""Overflow: a skipped step was reported as taken, or the scaler was left so that the next unscale
failed.

With an optimizer on another thread the finding arrives after the loop has gone on. Here one
microbatch overflows at step 2, a single stage's gradient is NaN at step 5, at step 6 the user
unscales but does not step, and one call fails. The oracle is torch.amp.GradScaler("cpu") on the
plain model.

Source: huggingface/accelerate#4242, pytorch/pytorch#44511.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, GradScaler, RoundPipe
from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import Batch, make_mlp, mlp_batch
from tests.support.reference import weights_of

SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
MARK = 7.0
STEPS, OVERFLOWS, IS_NAN, NOT_STEPPED = 8, 2, 5, 6


class Spoil(torch.autograd.Function):
    """The weight's own gradient is NaN if the input carries the mark; nothing else is touched."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.is_marked = bool((x[:, 0] == MARK).any())
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (math.nan if ctx.is_marked else 1.0), None


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * Spoil.apply(self.weight, x)


def make_model() -> nn.Sequential:
    return nn.Sequential(Gain(), *make_mlp())


def make_batches() -> list[Batch]:
    batches = [mlp_batch(6, seed) for seed in range(STEPS)]
    batches[OVERFLOWS].label[0, 0] = math.inf
    batches[IS_NAN].args[0][0, 0] = MARK
    return batches


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def counters(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(state["step"]) for state in optimizer.state.values()}


def scaled_by(scaler: Any, batch: Batch) -> Batch:
    return batch._replace(
        loss_fn=lambda output, target: scaler.scale(batch.loss_fn(output, target))
    )


@pytest.mark.parametrize(
    "make", [adamw, lambda params: roundpipe.optim.AdamW(params, lr=0.01)], ids=["torch", "ours"]
)
def test_the_trace_is_torchs(make: Any, devices: DeviceSet, engines: Engines) -> None:
    """Scale, weights and the optimizer's step counter after every step."""
    plain, theirs = make_model(), torch.amp.GradScaler("cpu", **SETTINGS)
    plain_optimizer = adamw(plain.parameters())
    engine, scaler = engines(make_model(), devices), GradScaler(**SETTINGS)
    optimizer = make(engine.optim_parameters())

    def step_fn(steps: bool) -> None:
        scaler.unscale_(optimizer)
        roundpipe.clip_grad_norm_(optimizer, 0.5)
        if steps:
            scaler.step(optimizer)
        optimizer.zero_grad()

    scales = []
    for index, batch in enumerate(make_batches()):
        for args, _, label in batch.split(2):
            theirs.scale(batch.loss_fn(plain(*args), label)).backward()
        theirs.unscale_(plain_optimizer)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if index != NOT_STEPPED:
            theirs.step(plain_optimizer)
        theirs.update()
        plain_optimizer.zero_grad()

        run_batch(engine, scaled_by(scaler, batch), 2)
        engine.step(step_fn, False, index != NOT_STEPPED)
        scaler.update()
        assert scaler.get_scale() == theirs.get_scale(), f"after step {index}"
        devices.check(engine_weights(engine), weights_of(plain), bitwise=False)
        assert counters(optimizer) == counters(plain_optimizer), f"after step {index}"
        scales.append(scaler.get_scale())
    assert scales == [1024, 2048, 1024, 1024, 2048, 1024, 1024, 2048]
    assert counters(optimizer) == {5.0}


@pytest.fixture
def scaler() -> GradScaler:
    return GradScaler(**SETTINGS)


@pytest.fixture
def engine(engines: Engines) -> RoundPipe:
    return engines(make_model(), TWO)


def steps_normally(engine: RoundPipe, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    before = engine_weights(engine)
    run_batch(engine, scaled_by(scaler, mlp_batch(6)), 2)
    engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
    scaler.update()
    after = engine_weights(engine)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_unscaling_twice_is_an_error_and_the_next_step_works(
    engine: RoundPipe, scaler: GradScaler
) -> None:
    optimizer = adamw(engine.optim_parameters())
    run_batch(engine, scaled_by(scaler, mlp_batch(6)), 2)

    def twice() -> None:
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    with pytest.raises(
        RuntimeError, match="already been called on this optimizer since the last update"
    ):
        engine.step(twice, is_async=False)
    scaler.update()
    steps_normally(engine, optimizer, scaler)


def test_two_steps_without_an_update_are_an_error_as_in_torch(
    engine: RoundPipe, scaler: GradScaler
) -> None:
    optimizer = adamw(engine.optim_parameters())
    for may in (True, False):
        run_batch(engine, scaled_by(scaler, mlp_batch(6)), 2)
        if may:
            engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
            continue
        with pytest.raises(RuntimeError, match="already been called since the last update"):
            engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
    scaler.update()
    steps_normally(engine, optimizer, scaler)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_update_without_a_step_is_an_error_as_in_torch(
    is_async: bool, engine: RoundPipe, scaler: GradScaler
) -> None:
    optimizer = adamw(engine.optim_parameters())
    run_batch(engine, scaled_by(scaler, mlp_batch(6)), 2)
    engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=is_async)
    scaler.update()
    with pytest.raises(ConfigError, match="no gradient was checked"):
        scaler.update()
    steps_normally(engine, optimizer, scaler)


def test_a_step_fn_that_raised_does_not_upset_the_next_update(
    engine: RoundPipe, scaler: GradScaler
) -> None:
    optimizer = adamw(engine.optim_parameters())

    def fail() -> None:
        raise LookupError("a fault of the user's")

    for step_fn in (fail, lambda: scaler.step(optimizer)):
        run_batch(engine, scaled_by(scaler, mlp_batch(6)), 2)
        handle = engine.step(step_fn, is_async=True)
        scaler.update()
        if step_fn is fail:
            with pytest.raises(LookupError, match="a fault of the user's"):
                handle.wait()
    steps_normally(engine, optimizer, scaler)


def test_calls_on_the_wrong_thread_are_refused(engine: RoundPipe, scaler: GradScaler) -> None:
    optimizer = adamw(engine.optim_parameters())
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ConfigError, match="outside step_fn"):
            call(optimizer)
    run_batch(engine, scaled_by(scaler, mlp_batch(6)), 2)
    with pytest.raises(ConfigError, match="inside step_fn"):
        engine.step(scaler.update, is_async=False)

    def updates(output: Tensor, target: Tensor) -> Tensor:
        scaler.update()
        return scaler.scale(output.sum())

    with pytest.raises(ConfigError, match="inside a layer or loss_fn"):
        run_batch(engine, mlp_batch(6)._replace(loss_fn=updates), 2)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_torchs_own_scaler_is_refused_before_it_changes_anything(
    fused: bool, engine: RoundPipe
) -> None:
    """Fused optimizers leave unscaling and skipping to their kernel, which ours replace: a silent
    step on infs."""
    optimizer = (
        roundpipe.optim.AdamW(engine.optim_parameters())
        if fused
        else adamw(engine.optim_parameters())
    )
    theirs = torch.amp.GradScaler("cpu", **SETTINGS)
    before = engine_weights(engine)
    run_batch(engine, scaled_by(theirs, mlp_batch(6)), 2)
    with pytest.raises(ConfigError, match="use roundpipe.GradScaler"):
        engine.step(lambda: theirs.step(optimizer), is_async=False)
    TWO.check(engine_weights(engine), before)


def test_a_loss_that_was_not_scaled_is_noticed(engine: RoundPipe, scaler: GradScaler) -> None:
    optimizer = adamw(engine.optim_parameters())
    run_batch(engine, mlp_batch(6), 2)
    with pytest.raises(ConfigError, match="no loss was multiplied"):
        engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
