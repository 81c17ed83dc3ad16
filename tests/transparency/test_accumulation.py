"""Gradients of several calls add up until the next step; nothing is rescaled, nothing leaks into
the next window."""

import copy
import threading

import pytest
import torch

from roundpipe.optim import SGD, OptimizerCtx
from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import CASES, ModelCase, make_mlp, mlp_batch
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import Reference, plain_call


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_calls_give_the_sum_of_three_single_gradients(
    case: ModelCase, devices: DeviceSet, engines: Engines
) -> None:
    """Each call is summed from zero, then added: bitwise that grouping, and plain accumulation up
    to rounding."""
    model = case.make()
    plain = copy.deepcopy(model)
    batches = [case.batch(4, seed) for seed in range(3)]
    singles = [
        plain_call(copy.deepcopy(model), batch.split(2), batch.loss_fn).gradients
        for batch in batches
    ]
    grouped = {name: singles[0][name] + singles[1][name] + singles[2][name] for name in singles[0]}
    for batch in batches:
        for args, kwargs, label in batch.split(2):
            batch.loss_fn(plain(*args, **kwargs), label).backward()
    accumulated = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    engine = engines(model, devices)
    for batch in batches:
        run_batch(engine, batch, 2)
    gradients = engine_gradients(engine)
    devices.check(gradients, grouped, bitwise=not case.tied)
    devices.check(gradients, accumulated, bitwise=False)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_windows_of_unequal_length_train_as_the_reference(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    reference = Reference(model, sgd, staleness=int(is_async))
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    seed = 0
    for window in (3, 1, 2, 3, 1):
        for _ in range(window):
            batch = mlp_batch(rows=4, seed=seed)
            seed += 1
            reference.forward_backward(batch.split(2), batch.loss_fn)
            run_batch(engine, batch, 2)
        reference.step()
        engine.step(optimizer.step, is_async=is_async)
    devices.check(engine_weights(engine), reference.weights)


def test_zero_grad_drops_what_was_not_stepped(devices: DeviceSet, engines: Engines) -> None:
    model = make_mlp()
    first, second = mlp_batch(rows=4, seed=0), mlp_batch(rows=4, seed=1)
    expected = plain_call(copy.deepcopy(model), second.split(2), second.loss_fn).gradients
    engine = engines(model, devices)
    run_batch(engine, first, 2)
    engine.synchronize()
    engine.zero_grad()
    assert all(
        parameter.grad is None or not parameter.grad.any() for parameter in model.parameters()
    )
    assert not any(gradient.any() for gradient in engine_gradients(engine).values())
    run_batch(engine, second, 2)
    devices.check(engine_gradients(engine), expected)


def test_after_a_step_gradients_start_from_zero(devices: DeviceSet, engines: Engines) -> None:
    engine = engines(make_mlp(), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.0)
    batch = mlp_batch(rows=4)
    run_batch(engine, batch, 2)
    expected = engine_gradients(engine)
    for is_async in (False, True):
        engine.step(optimizer.step, is_async=is_async)
        run_batch(engine, batch, 2)
        devices.check(engine_gradients(engine), expected)


def test_edits_of_the_copies_in_grad_are_ignored(devices: DeviceSet, engines: Engines) -> None:
    reference = Reference(make_mlp(), sgd)
    batch = mlp_batch(rows=4)
    reference.forward_backward(batch.split(2), batch.loss_fn)
    reference.step()
    engine = engines(make_mlp(), devices)
    optimizer = sgd(engine.optim_parameters())
    run_batch(engine, batch, 2)
    engine.synchronize()
    for parameter in engine.model.parameters():
        parameter.grad.fill_(7.0)
    engine.step(optimizer.step, is_async=False)
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("grad_dtype", [None, torch.float32], ids=str)
def test_low_precision_gradients_of_several_calls_are_summed_in_fp32(
    grad_dtype: torch.dtype | None, engines: Engines
) -> None:
    """Each call's gradient is rounded once, to `grad_dtype`; the sum over calls is not rounded
    again.

    Forty equal calls: summed in bf16 the total would stick at a multiple far below forty. Virtual
    devices only, where bf16 products are the oracle's to the bit.
    """
    batch = mlp_batch(rows=4)
    batch = batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16())
    reference = Reference(
        make_mlp().bfloat16(),
        sgd,
        optim_dtype=torch.float32,
        grad_dtype=grad_dtype or torch.bfloat16,
    )
    engine = engines(make_mlp().bfloat16(), TWO, optim_dtype=torch.float32, grad_dtype=grad_dtype)
    optimizer = sgd(engine.optim_parameters())
    for _ in range(40):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2)
    reference.step()
    engine.step(optimizer.step, is_async=False)
    TWO.check(dict(engine.optim_named_parameters()), reference.weights)


def test_freezing_a_weight_behind_its_calls_changes_nothing_of_their_sum(engines: Engines) -> None:
    """Calls are added up later, by the optimizer thread: in the precision that masters have in any
    case."""

    def train(*, freezes: bool) -> list[torch.Tensor]:
        model = make_mlp().bfloat16()
        engine = engines(model, optim_dtype=torch.float32)
        optimizer = SGD(engine.optim_parameters(), lr=0.1)
        gate = threading.Event()
        engine.step(lambda: gate.wait(PATIENCE_S), is_async=True)
        for seed in range(3):
            batch = mlp_batch(rows=4, seed=seed)
            run_batch(
                engine,
                batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16()),
                2,
            )
        for parameter in model.parameters():
            parameter.requires_grad_(not freezes)
        gate.set()
        with OptimizerCtx():  # waits
            pass
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        engine.step(optimizer.step, is_async=False)
        return [master.detach().clone() for master in engine.optim_parameters()]

    for actual, expected in zip(train(freezes=True), train(freezes=False), strict=True):
        assert torch.equal(actual, expected)
