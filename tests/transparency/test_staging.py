"""With ``pin_model="off"`` weights stay where they are and go up through a ring, which changes no
number.

Slices are made so small that every layer takes several, on devices whose copies are as late as they
can be.
"""

import gc
import threading

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe
from roundpipe.device import Event
from roundpipe.memory import ring
from roundpipe.memory.ring import PinnedRing
from tests.support.adversaries import Adversaries
from tests.support.engines import Engines, engine_weights, reference_steps, run_batch, train_steps
from tests.support.models import LORA_LLAMA, MLP, TIED_LLAMA, ModelCase, make_mlp, mlp_batch
from tests.support.reference import Reference

NUM_MICROBATCH = 2


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SLICE_BYTES", 700)


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("case", "count", "is_async"),
    [
        (MLP, 1, False),
        (MLP, 2, True),
        (LORA_LLAMA, 2, False),
        (LORA_LLAMA, 1, True),
        (TIED_LLAMA, 2, True),
    ],
    ids=str,
)
def test_staged_weights_train_as_plain_pytorch_does(
    case: ModelCase, count: int, is_async: bool, engines: Engines
) -> None:
    devices = Adversaries(count)
    model = case.make()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    engine = engines(model, devices, pin_model="off")
    batches = [case.batch(4, seed) for seed in range(3)]
    losses = train_steps(
        engine, sgd(engine.optim_parameters()), batches, NUM_MICROBATCH, is_async=is_async
    )
    reference = Reference(case.make(), sgd, staleness=int(is_async))
    expected = reference_steps(reference, batches, NUM_MICROBATCH)
    for loss, other in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-6 if case.tied else 0, atol=0)
    for name, weight in engine_weights(engine).items():
        tolerance = (
            1e-6 if case.tied else 0
        )  # one weight, two uses: autograd adds them in another order
        torch.testing.assert_close(weight, reference.weights[name], rtol=tolerance, atol=tolerance)
    assert not devices.faults
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_while_weights_are_read_reaches_the_caller_and_has_no_effect(
    count: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an unreadable file would make one. The next call is right."""
    devices = Adversaries(count)
    engine = engines(make_mlp(), devices, pin_model="off")
    batch = mlp_batch(4)
    with monkeypatch.context() as patch:
        patch.setattr(PinnedRing, "_send_slice", _unreadable)
        with pytest.raises(OSError, match="unreadable") as caught:
            run_batch(engine, batch, NUM_MICROBATCH)
        assert any(
            str(devices.argument[0]) in note or "layer" in note for note in caught.value.__notes__
        )
    reference = Reference(make_mlp(), sgd)
    expected = reference.forward_backward(batch.split(NUM_MICROBATCH), batch.loss_fn)
    assert torch.equal(run_batch(engine, batch, NUM_MICROBATCH), expected)
    assert not devices.faults


def _unreadable(ring: PinnedRing, target: Tensor, start: int, pieces: object) -> Event:
    raise OSError("unreadable")


def test_an_engine_left_behind_ends_its_helper_threads() -> None:
    """The finalizer may run while calls are under way that still need them."""
    before = set(threading.enumerate())
    engine = RoundPipe(nn.Sequential(nn.Linear(4, 4)), pin_model="off", devices=2)
    engine.forward_backward((torch.randn(4, 4),), loss_fn=lambda outputs, _: outputs.sum())
    started = set(threading.enumerate()) - before
    assert sum(thread.name.startswith("roundpipe-sender") for thread in started) == 2
    del engine
    gc.collect()
    for thread in started:
        thread.join(30)
        assert not thread.is_alive(), thread.name
