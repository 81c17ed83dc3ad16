"""What ``step_fn`` does not zero stays, and the next step sees it added to what has come since.

The usual way to accumulate was ``if n % k == 0: optimizer.step(); optimizer.zero_grad()``: the
engine took the gradients at every ``step`` and dropped those of the calls between two updates.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipe
from tests.support.device_sets import ONE, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import make_mlp, mlp_batch
from tests.support.reference import plain_call, weights_of

BATCHES = [mlp_batch(rows=4, seed=seed) for seed in range(6)]
Optimizers = list[torch.optim.Optimizer]
Update = Callable[[int, Optimizers, Any], None]


def every_second(number: int, optimizers: Optimizers, _: Any) -> None:
    if number % 2 == 1:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def one_every_second(number: int, optimizers: Optimizers, _: Any) -> None:
    first, second = optimizers
    first.step()
    first.zero_grad()
    if number % 2 == 1:
        second.step()
        second.zero_grad()


def zeroes_in_place(number: int, optimizers: Optimizers, _: Any) -> None:
    for optimizer in optimizers:
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def never_zeroes(number: int, optimizers: Optimizers, _: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()


def clips_each_time(number: int, optimizers: Optimizers, clip: Any) -> None:
    clip(0.05)
    every_second(number, optimizers, clip)


UPDATES: list[Update] = [
    every_second,
    one_every_second,
    zeroes_in_place,
    never_zeroes,
    clips_each_time,
]


def pair(weights: list[Any], make: Any) -> Optimizers:
    return [make(weights[:2], lr=0.05), make(weights[2:], lr=0.05)]


def plain_training(
    update: Update, make: Any, *, staleness: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """An ordinary loop, whose gradients may be one step old."""
    model, weights = make_mlp(), make_mlp()
    named = dict(weights.named_parameters())
    optimizers = pair(list(named.values()), make)
    versions, losses = [weights_of(weights)], []
    for number, batch in enumerate(BATCHES):
        model.load_state_dict(versions[max(number - staleness, 0)], strict=False)
        call = plain_call(model, batch.split(2), batch.loss_fn)
        losses.append(call.loss)
        for name, gradient in call.gradients.items():
            had = named[name].grad
            named[name].grad = gradient if had is None else had + gradient
        update(
            number,
            optimizers,
            lambda most: torch.nn.utils.clip_grad_norm_(named.values(), most),
        )
        versions.append(weights_of(weights))
    return versions[-1], losses


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("own", [False, True], ids=["torch's", "ours"])
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_what_is_not_zeroed_stays(
    update: Update, own: bool, is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    expected, losses = plain_training(update, torch.optim.AdamW, staleness=int(is_async))
    engine = engines(make_mlp(), devices)
    make = roundpipe.optim.AdamW if own else torch.optim.AdamW
    optimizers = pair(list(engine.optim_parameters()), make)

    def clip(most: float) -> Any:
        if own:
            return roundpipe.clip_grad_norm_(engine, most)
        return torch.nn.utils.clip_grad_norm_(engine.parameters(), most)

    for number, batch in enumerate(BATCHES):
        loss = run_batch(engine, batch, 2)
        devices.check(loss, losses[number], bitwise=False)
        engine.step(update, is_async, number, optimizers, clip)
    devices.check(engine_weights(engine), expected, bitwise=False)


def test_what_is_left_shows_in_the_models_gradients(devices: DeviceSet, engines: Engines) -> None:
    engine = engines(make_mlp(), devices)
    engine.optim_parameters()
    expected: dict[str, Tensor] = {}
    for batch in BATCHES[:3]:
        run_batch(engine, batch, 2)
        engine.step(lambda: None)
        call = plain_call(make_mlp(), batch.split(2), batch.loss_fn)
        expected = {name: expected.get(name, 0) + g for name, g in call.gradients.items()}
    devices.check(engine_gradients(engine), expected)
    engine.zero_grad()
    assert engine_gradients(engine) == {}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_gradients_are_there_after_a_step_fn_that_raised(is_async: bool, engines: Engines) -> None:
    """Who mends a mistake in ``step_fn`` and calls ``step`` again goes on from where it was."""
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCHES[0], 2)
    with pytest.raises(ZeroDivisionError):
        engine.step(lambda: 1 / 0, is_async).wait()
    engine.step(optimizer.step, is_async=False)
    plain = make_mlp()
    call = plain_call(plain, BATCHES[0].split(2), BATCHES[0].loss_fn)
    for name, parameter in plain.named_parameters():
        parameter.grad = call.gradients[name]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    ONE.check(engine_weights(engine), weights_of(plain))


def bf16_model() -> nn.Sequential:
    return make_mlp().bfloat16()


def tied_model() -> nn.Sequential:
    model = make_mlp()
    model[4].weight = model[0].weight
    return model


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [bf16_model, tied_model])
def test_sums_over_steps_are_fp32(
    make: Callable[[], nn.Sequential], is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make(), devices, optim_dtype=torch.float32)
    engine.optim_parameters()
    where = devices.argument[0] if devices.kind == "cuda" else torch.device("cpu")
    plain = make().to(where)  # because kernels of other devices round bf16 otherwise
    dtype = plain[0].weight.dtype
    expected: dict[str, Tensor] = {}

    def gradients() -> dict[str, Tensor]:
        return {name: master.grad.clone() for name, master in engine.named_parameters()}

    for batch in BATCHES:
        batch = batch._replace(args=(batch.args[0].to(dtype),), label=batch.label.to(dtype))
        run_batch(engine, batch, 1)
        seen = engine.step(gradients, is_async).result()
        there = batch._replace(args=(batch.args[0].to(where),), label=batch.label.to(where))
        call = plain_call(plain, there.whole(), batch.loss_fn)
        expected = {name: expected.get(name, 0) + g for name, g in call.gradients.items()}
        # The uses of a tied weight are added one by one.
        devices.check(seen, expected, bitwise=make is bf16_model)


def test_leaving_used_gradients_is_said_once(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for batch in BATCHES[:3]:
        run_batch(engine, batch, 2)
        engine.step(lambda: optimizer.step(), is_async=False)
    said = [record for record in caplog.records if "left its gradients" in record.message]
    assert len(said) == 1


def train(engine: RoundPipe, step_of: Callable[[torch.optim.Optimizer], Any]) -> Any:
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps the optimizer's `step`
    for batch in BATCHES[:3]:
        run_batch(engine, batch, 2)
        engine.step(step_of(optimizer), is_async=False)
    return engine_weights(engine)


def test_an_optimizers_own_step_has_nobody_to_zero(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    zeroing = train(
        engines(make_mlp(), ONE),
        lambda optimizer: lambda: [optimizer.step(), optimizer.zero_grad()],
    )
    ONE.check(train(engines(make_mlp(), ONE), lambda optimizer: optimizer.step), zeroing)
    assert not [record for record in caplog.records if "left its gradients" in record.message]
