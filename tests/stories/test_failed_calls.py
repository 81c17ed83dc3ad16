"""A call or step that failed had counted already, or hung.

A call's gradients, buffers and random numbers were the user's before its outputs were merged, which
may raise: repeated after the error, it counted twice. A synchronous step that failed marked the
asynchronous one before it as written back although it never was, so calls went on at weights two
steps old. And a device that dies, as CUDA does after a device assert, raised from the very waits
that end a call, so that its caller waited for ever.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.device.virtual import VirtualDevice, VirtualLane
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, make_mlp, mlp_batch
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import Reference, buffers_of

BATCH = mlp_batch(rows=12)


class Boom(Exception):
    """The user's own exception."""


def bad_merge(*_: Any) -> Any:
    raise Boom("raised in merge_output")


def make_dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
        nn.BatchNorm1d(MLP_WIDTH),
        nn.Dropout(0.5),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
    )


def fails_in_forward_backward(engine: RoundPipe) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=bad_merge)
    engine.forward_backward(
        BATCH.args, label=BATCH.label, loss_fn=BATCH.loss_fn, return_outputs=True, run_config=config
    )


def fails_in_forward(engine: RoundPipe) -> None:
    engine(
        *BATCH.args,
        roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2, merge_output=bad_merge),
    )


def fails_in_forward_without_grad(engine: RoundPipe) -> None:
    with torch.no_grad():
        fails_in_forward(engine)


def fails_in_the_sum_of_losses(engine: RoundPipe) -> None:
    """One microbatch has more losses than the other."""
    first = BATCH.label.chunk(2)[0]

    def loss_fn(output: Tensor, target: Tensor) -> list[Tensor]:
        return [BATCH.loss_fn(output, target)] * (1 if torch.equal(target.cpu(), first) else 2)

    run_batch(engine, BATCH._replace(loss_fn=loss_fn), 2)


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (fails_in_forward_backward, Boom),
        (fails_in_forward, Boom),
        (fails_in_forward_without_grad, Boom),
        (fails_in_the_sum_of_losses, ValueError),
    ],
    ids=["forward_backward", "forward", "no_grad", "losses"],
)
def test_a_call_whose_results_cannot_be_merged_has_not_been(
    fail: Any, error: type[Exception], devices: DeviceSet, engines: Engines
) -> None:
    """No gradients, no draw of the caller's generator, no buffers; the same for a call before it,
    and one after it."""
    engine, twin = engines(make_dropping(), devices), engines(make_dropping(), devices)
    for each in (engine, twin):
        torch.manual_seed(5)
        run_batch(each, BATCH, 2)
        each.synchronize()
    drawn = torch.get_rng_state()
    with pytest.raises(error):
        fail(engine)
    assert torch.equal(torch.get_rng_state(), drawn), "the caller's generator moved"
    devices.check(engine_gradients(engine), engine_gradients(twin))
    devices.check(buffers_of(engine.model), buffers_of(twin.model))
    for each in (engine, twin):
        torch.set_rng_state(drawn)
        run_batch(each, BATCH, 2)
    devices.check(engine_gradients(engine), engine_gradients(twin))
    devices.check(buffers_of(engine.model), buffers_of(twin.model))


def test_a_synchronous_step_that_fails_after_an_asynchronous_one(
    devices: DeviceSet, engines: Engines
) -> None:
    """It did nothing, and so calls after it are at the weights of the step before."""

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def step_fn() -> None:
        raise Boom("raised in step_fn")

    model = make_mlp()
    reference, stale = Reference(model, sgd), Reference(model, sgd, staleness=1)
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    for each in (reference, stale):
        each.forward_backward(BATCH.split(2), BATCH.loss_fn)
        each.step()
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step)
    at_old_weights = stale.forward_backward(BATCH.split(2), BATCH.loss_fn)
    devices.check(run_batch(engine, BATCH, 2), at_old_weights)
    with pytest.raises(Boom):
        engine.step(step_fn, is_async=False)
    engine.zero_grad()
    at_new_weights = reference.forward_backward(BATCH.split(2), BATCH.loss_fn)
    assert not torch.equal(at_new_weights, at_old_weights)
    devices.check(run_batch(engine, BATCH, 2), at_new_weights)
    devices.check(engine_weights(engine), reference.weights)
    devices.check(engine_gradients(engine), reference.gradients)


class MortalLane(VirtualLane):
    """After its device has died every use of it raises, waits included."""

    is_dead = False

    def record(self) -> Any:
        if self.is_dead:
            raise RuntimeError("device-side assert triggered (again)")
        return super().record()


class MortalDevice(VirtualDevice):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.lane = MortalLane()
        self.compute = self.up = self.down = self.lane


class Deadly(nn.Module):
    """Kills the devices, if it is to."""

    def __init__(self, devices: list[MortalDevice]) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.kill = lambda: [setattr(device.lane, "is_dead", True) for device in devices]

    def forward(self, hidden: Tensor) -> Tensor:
        self.kill()
        raise RuntimeError("device-side assert triggered")


@pytest.mark.parametrize("count", [1, 2])
def test_a_device_that_dies_does_not_hang_the_caller(count: int) -> None:
    """Neither in the call, nor in the next one, nor in close(). In threads, as a hang must not be
    the whole suite's."""
    mortal = [MortalDevice(index) for index in range(count)]
    engine = RoundPipe(
        nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), Deadly(mortal)), devices=mortal
    )
    caught: list[BaseException] = []

    def use_it() -> None:
        for _ in range(2):
            try:
                run_batch(engine, BATCH, 2)
            except BaseException as error:
                caught.append(error)
        try:
            engine.close()
        except RuntimeError as error:
            caught.append(error)

    user = threading.Thread(target=use_it, daemon=True)
    user.start()
    user.join(PATIENCE_S)
    assert not user.is_alive(), "the caller hangs"
    assert len(caught) >= 2
    # Both devices are dead before the layer raises, so the other's worker may have met it sooner.
    if count == 1:
        assert str(caught[0]) == "device-side assert triggered", "the first error is the one to see"
    assert all("assert triggered" in str(error) for error in caught)
