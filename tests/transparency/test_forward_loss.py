"""`forward_loss()`: the losses of `forward_backward` alone, at the newest weights, with nothing
left behind."""

from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe import RoundPipe, RoundPipeRunConfig
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import CASES, ModelCase, make_mlp, mlp_batch
from tests.support.reference import Reference

BATCH = mlp_batch(rows=6)


def losses_of(engine: RoundPipe, batch: Any, loss_fn: Any, num_microbatch: int = 2) -> Any:
    config = RoundPipeRunConfig(num_microbatch=num_microbatch)
    return engine.forward_loss(batch.args, batch.kwargs, batch.label, loss_fn, config)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sum_equals_the_plain_loss(
    case: ModelCase, devices: DeviceSet, engines: Engines
) -> None:
    """Also called with autograd on it makes no graph, and accumulates no gradient."""
    batch = case.batch(4, 0)
    model = case.make().eval()
    expected = sum(
        batch.loss_fn(model(*m.args, **m.kwargs), m.label) for m in batch.split(2)
    ).detach()  # type: ignore[union-attr]
    engine = engines(model, devices)
    loss = losses_of(engine, batch, batch.loss_fn)
    assert not loss.requires_grad
    devices.check(loss, expected)
    assert engine_gradients(engine) == {}


def test_pending_updates_are_in(engines: Engines) -> None:
    """It sees the weights after an asynchronous step, where `forward_backward` would still see
    those before."""
    model = make_mlp()
    reference = Reference(make_mlp(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    engine = engines(model, ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    run_batch(engine, BATCH, 2)
    engine.step(optimizer.step)
    reference.forward_backward(BATCH.split(2), BATCH.loss_fn)
    reference.step()
    loss = losses_of(engine, BATCH, BATCH.loss_fn)
    expected = reference.forward_backward(BATCH.split(2), BATCH.loss_fn)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)


def test_a_failed_loss_has_no_effect_and_sequences_come_back_as_such(engines: Engines) -> None:
    engine = engines(make_mlp(), TWO)

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken") as caught:
        losses_of(engine, BATCH, broken)
    assert any("layer 'loss_fn'" in note for note in caught.value.__notes__)
    both = losses_of(engine, BATCH, lambda output, target: [output.sum(), target.sum()])
    torch.testing.assert_close(both[1], BATCH.label.sum())
    assert isinstance(both, list)
