"""A gradient that did not come through the engine is refused by the step, and nothing is lost.

A loop of one's own that put it into ``.grad``, or whose loss had a penalty on weights beside the
engine's output, trained without it, and nobody said so.
"""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe_hf.accelerate import RoundPipeAccelerator
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import make_mlp, mlp_batch
from tests.support.reference import weights_of

BATCH = mlp_batch(rows=4)
FROM_ELSEWHERE = "has a gradient in .grad that did not come through the engine"


def penalty(model: nn.Module) -> Tensor:
    return 0.5 * torch.stack([weight.square().sum() for weight in model.parameters()]).sum()


def plain_weights() -> dict[str, Tensor]:
    """One step of plain PyTorch with the penalty."""
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (mse_loss(model(*BATCH.args), BATCH.label) + penalty(model)).backward()
    optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_penalty_beside_the_engines_output(is_async: bool, engines: Engines) -> None:
    """Handed over as the message says, it is in the update as in plain PyTorch's."""
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    (mse_loss(engine(*BATCH.args), BATCH.label) + penalty(engine.model)).backward()
    with pytest.raises(ConfigError, match=FROM_ELSEWHERE):
        engine.step(optimizer.step, is_async)
    weights = list(engine.model.parameters())
    engine.add_gradients({weight: weight.grad for weight in weights})
    for weight in weights:
        weight.grad = None
    engine.step(optimizer.step, is_async)
    ONE.check(engine_weights(engine), plain_weights(), bitwise=False)


def test_a_penalty_in_a_loop_of_accelerates() -> None:
    accelerator = RoundPipeAccelerator(cpu=True)
    with RoundPipe(make_mlp(), devices=1) as made:
        optimizer = torch.optim.SGD(made.optim_parameters(), lr=0.1)
        engine, optimizer = accelerator.prepare(made, optimizer)
        loss = mse_loss(engine(*BATCH.args), BATCH.label) + penalty(engine.model)
        accelerator.backward(loss)
        with pytest.raises(ConfigError, match=FROM_ELSEWHERE):
            optimizer.step()


def set_one(weights: list[nn.Parameter]) -> None:
    weights[1].grad = torch.ones_like(weights[1])


def trained(engine: RoundPipe, is_async: bool, before: Callable[[], None]) -> dict[str, Tensor]:
    """Two steps, before the second of which something happens."""
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for number in range(2):
        run_batch(engine, BATCH, 2)
        if number == 1:
            before()
        engine.step(optimizer.step, is_async).wait()
    return engine_weights(engine)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("whose", ["the model's", "the optimizer's"])
def test_a_gradient_that_is_set(whose: str, is_async: bool, engines: Engines) -> None:
    """The step that was refused can be taken again, without it."""
    expected = trained(engines(make_mlp(), ONE), is_async, lambda: None)
    engine = engines(make_mlp(), ONE)
    is_models = whose == "the model's"
    weights = list(engine.model.parameters() if is_models else engine.optim_parameters())
    message = FROM_ELSEWHERE if is_models else "copy of '0.bias' was set outside of step_fn"

    def sets_one() -> None:
        set_one(weights)
        with pytest.raises(ConfigError, match=message):
            engine.step(lambda: None, is_async).wait()
        weights[1].grad = None

    ONE.check(trained(engine, is_async, sets_one), expected)


def test_a_gradient_that_is_set_while_a_step_runs(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    masters = list(engine.optim_parameters())
    run_batch(engine, BATCH, 2)
    engine.step(torch.optim.SGD(masters, lr=0.1).step)  # because the first one is waited for
    begun, was_set = threading.Event(), threading.Event()

    def step_fn() -> None:
        begun.set()
        was_set.wait()

    handle = engine.step(step_fn, True)
    begun.wait()
    set_one(masters)
    was_set.set()
    handle.wait()
    with pytest.raises(ConfigError, match="was set outside of step_fn"):
        engine.step(step_fn, True)


def test_gradients_older_than_the_engine_are_let_pass(engines: Engines) -> None:
    """Plain PyTorch has trained the model before, and zeroes at the beginning of its loop."""
    model = make_mlp()
    mse_loss(model(*BATCH.args), BATCH.label).backward()
    expected = trained(engines(make_mlp(), ONE), False, lambda: None)
    ONE.check(trained(engines(model, ONE), False, lambda: None), expected)


def test_copies_that_are_only_shown_are_let_pass(engines: Engines) -> None:
    expected = trained(engines(make_mlp(), ONE), False, lambda: None)
    engine = engines(make_mlp(), ONE)
    ONE.check(trained(engine, False, engine.synchronize), expected)
