"""The engine computes what plain PyTorch computes: losses, gradients, and weights after
training."""

import copy

import pytest
import torch

from tests.support.device_sets import DeviceSet
from tests.support.engines import (
    Engines,
    engine_gradients,
    engine_weights,
    reference_steps,
    run_batch,
    train_steps,
)
from tests.support.models import CASES, ModelCase
from tests.support.reference import Reference, plain_call

STEPS = 6


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("num_microbatch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_every_gradient_equal_the_plain_loop(
    case: ModelCase, num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    """Bitwise, except for tied weights: autograd adds their uses within a microbatch, the engine
    after all of them."""
    model = case.make()
    batch = case.batch(2 * num_microbatch, 0)
    expected = plain_call(copy.deepcopy(model), batch.split(num_microbatch), batch.loss_fn)
    engine = engines(model, devices)
    loss = run_batch(engine, batch, num_microbatch)
    assert (loss.device.type, loss.requires_grad, loss.ndim) == ("cpu", False, 0)
    devices.check(loss, expected.loss)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=not case.tied)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_of_six_synchronous_steps_equal_the_plain_loop(
    case: ModelCase, devices: DeviceSet, engines: Engines
) -> None:
    model = case.make()
    batches = [case.batch(4, seed) for seed in range(STEPS)]
    reference = Reference(model, sgd)
    expected = reference_steps(reference, batches, 2)
    engine = engines(model, devices)
    losses = train_steps(engine, sgd(engine.optim_parameters()), batches, 2, is_async=False)
    devices.check(torch.stack(losses), torch.stack(expected), bitwise=not case.tied)
    devices.check(engine_weights(engine), reference.weights, bitwise=not case.tied)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_and_weights_of_six_asynchronous_steps_are_one_step_stale(
    case: ModelCase, devices: DeviceSet, engines: Engines
) -> None:
    """R1, not R0 and not something in between; after the final flush nothing is missing."""
    model = case.make()
    batches = [case.batch(4, seed) for seed in range(STEPS)]
    reference = Reference(model, sgd, staleness=1)
    expected = reference_steps(reference, batches, 2)
    engine = engines(model, devices)
    losses = train_steps(engine, sgd(engine.optim_parameters()), batches, 2, is_async=True)
    devices.check(torch.stack(losses), torch.stack(expected), bitwise=not case.tied)
    devices.check(engine_weights(engine), reference.weights, bitwise=not case.tied)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_low_precision_weights_with_fp32_masters(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    """bf16 gradients are summed in fp32 over the microbatches, rounded once, and applied to fp32
    masters.

    On a GPU bf16 products round differently, more than fp32 tolerances cover: there only the dtypes
    are checked.
    """
    case = CASES[0]
    model = case.make().bfloat16()
    batches = [
        batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16())
        for batch in (case.batch(12, seed) for seed in range(STEPS))
    ]
    reference = Reference(
        model, sgd, staleness=int(is_async), optim_dtype=torch.float32, grad_dtype=torch.bfloat16
    )
    reference_steps(reference, batches, 3)
    engine = engines(model, devices, optim_dtype=torch.float32)
    masters = dict(engine.optim_named_parameters())
    assert {master.dtype for master in masters.values()} == {torch.float32}
    train_steps(engine, sgd(engine.optim_parameters()), batches, 3, is_async=is_async)
    weights = engine_weights(engine)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    if devices.kind == "virtual":
        devices.check(masters, reference.weights)
        devices.check(
            weights, {name: master.bfloat16() for name, master in reference.weights.items()}
        )
