"""Asynchronous training with one working copy per weight and with two: the same numbers, and reads
that never lie.

With memory to spare an asynchronous update writes a second working copy, and the two take turns;
without, the new weights are written back by the next step. See [Note: two working copies].
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipe
from roundpipe.step import write_back
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, reference_steps, train_steps
from tests.support.models import LORA_LLAMA, TIED_LLAMA, make_mlp, mlp_batch
from tests.support.reference import Reference

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(7)]
MEMORY = {"one copy": 0, "two copies": 1 << 60}


@pytest.fixture(params=MEMORY)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The memory that the machine seems to have decides."""
    monkeypatch.setattr(write_back, "free_host_bytes", lambda: MEMORY[request.param])
    return request.param


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


MAKERS: dict[
    str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], torch.optim.Optimizer]]
] = {
    "deferred": (lambda params: roundpipe.optim.AdamW(params, lr=0.01), plain_adamw),
    "torch's": (sgd, sgd),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_asynchronous_training_is_one_step_stale_either_way(
    kind: str, copies: str, devices: DeviceSet, engines: Engines
) -> None:
    make, plain = MAKERS[kind]
    reference = Reference(make_mlp(), plain, staleness=1)
    expected = reference_steps(reference, BATCHES, 2)
    engine = engines(make_mlp(), devices)
    losses = train_steps(engine, make(engine.optim_parameters()), BATCHES, 2, is_async=True)
    assert (engine.statistics()["second_buffer_bytes"] > 0) == (copies == "two copies")
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_reads_in_between_see_the_newest_weights_in_the_users_own_parameters(
    every: int, copies: str, engines: Engines
) -> None:
    """Also through tensors that the user has held since before."""
    model = make_mlp()
    reference = Reference(model, sgd, staleness=1)
    engine = engines(model, TWO)
    optimizer = sgd(engine.optim_parameters())
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    for index, batch in enumerate(BATCHES):
        reference_steps(reference, [batch], 2)
        train_steps(engine, optimizer, [batch], 2, is_async=True)
        if index % every == 0:
            engine.synchronize()
            reference.flush()
            TWO.check(held, reference.weights)


def test_synchronous_and_asynchronous_steps_in_turn(
    copies: str, devices: DeviceSet, engines: Engines
) -> None:
    reference = Reference(make_mlp(), sgd, staleness=1)
    engine = engines(make_mlp(), devices)
    optimizer = sgd(engine.optim_parameters())
    losses, expected = [], []
    for batch, is_async in zip(BATCHES, [True, True, True, False, True, False, True], strict=True):
        expected += reference_steps(reference, [batch], 2)
        losses += train_steps(engine, optimizer, [batch], 2, is_async=is_async)
        if not is_async:
            reference.flush()
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("case", [TIED_LLAMA, LORA_LLAMA], ids=str)
def test_tied_and_frozen_weights(case: Any, copies: str, engines: Engines) -> None:
    """A tied weight lies with its first layer; of a layer with frozen weights only the others are
    there twice.

    The two ways agree to the bit with each other, which the other fixture value shows by agreeing
    with the reference.
    """
    batches = [case.batch(4, seed) for seed in range(4)]
    reference = Reference(case.make(), sgd, staleness=1)
    expected = reference_steps(reference, batches, 2)
    engine = engines(case.make(), TWO)
    optimizer = sgd(engine.optim_parameters())
    losses = train_steps(engine, optimizer, batches, 2, is_async=True)
    assert (engine.statistics()["second_buffer_bytes"] > 0) == (copies == "two copies")
    TWO.check(torch.stack(losses), torch.stack(expected), bitwise=False)
    TWO.check(engine_weights(engine), reference.weights, bitwise=False)


def test_adapters_are_there_twice_and_the_next_call_waits_for_nothing(
    copies: str, engines: Engines
) -> None:
    """Else it would wait until the call before is over and its gradients are added up, and the
    device with it."""
    engine = engines(LORA_LLAMA.make())
    optimizer = sgd(engine.optim_parameters())
    batches = [LORA_LLAMA.batch(4, seed) for seed in range(3)]
    train_steps(engine, optimizer, batches, 2, is_async=True)
    engine._steps.wait_idle()
    assert (engine._steps._write_back.version == len(batches)) == (copies == "two copies")
    trained = sum(
        parameter.nbytes for parameter in engine.model.parameters() if parameter.requires_grad
    )
    frozen = sum(
        parameter.nbytes for parameter in engine.model.parameters() if not parameter.requires_grad
    )
    assert engine.statistics()["second_buffer_bytes"] < trained + frozen / 4


def test_a_step_that_fails_writes_back_nothing_and_training_goes_on(
    copies: str, engines: Engines
) -> None:
    """Its changes to the masters are written back with those of the next step that succeeds."""
    engine, twin = engines(make_mlp(), TWO), engines(make_mlp(), TWO)
    optimizers = [sgd(one.optim_parameters()) for one in (engine, twin)]

    def failing() -> None:
        raise ZeroDivisionError

    for one, optimizer in zip((engine, twin), optimizers, strict=True):
        train_steps(one, optimizer, BATCHES[:3], 2, is_async=True)
    twin.synchronize()
    engine.step(failing).wait_over()
    with pytest.raises(ZeroDivisionError):
        engine.synchronize()
    TWO.check(engine_weights(engine), engine_weights(twin))
    for one, optimizer in zip((engine, twin), optimizers, strict=True):
        train_steps(one, optimizer, BATCHES[3:], 2, is_async=True)
    TWO.check(engine_weights(engine), engine_weights(twin))


def test_loaded_weights_are_those_trained_on(copies: str, engines: Engines) -> None:
    model = make_mlp()
    reference = Reference(model, sgd, staleness=1)
    engine = engines(model, ONE)
    optimizer = sgd(engine.optim_parameters())
    other = {name: value.detach().clone() for name, value in make_mlp(seed=5).state_dict().items()}
    for load in (
        lambda: engine.load_state_dict(other),
        lambda: change_in_place(engine, model, other),
    ):
        reference_steps(reference, BATCHES[:3], 2)
        train_steps(engine, optimizer, BATCHES[:3], 2, is_async=True)
        reference.load(other)
        load()
        expected = reference_steps(reference, BATCHES[3:], 2)
        losses = train_steps(engine, optimizer, BATCHES[3:], 2, is_async=True)
        ONE.check(torch.stack(losses), torch.stack(expected))
        ONE.check(engine_weights(engine), reference.weights)
        reference.flush()


def change_in_place(engine: RoundPipe, model: nn.Module, weights: dict[str, Tensor]) -> None:
    engine.synchronize()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    engine.reload_parameters()


def test_changes_in_place_without_a_flush_are_refused(copies: str, engines: Engines) -> None:
    """The newest weights are elsewhere, and would be lost."""
    engine = engines(make_mlp(), ONE)
    train_steps(engine, sgd(engine.optim_parameters()), BATCHES[:2], 2, is_async=True)
    with pytest.raises(roundpipe.ConfigError, match="synchronize"):
        engine.reload_parameters()


def test_nothing_is_taken_for_synchronous_training(copies: str, engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    train_steps(engine, sgd(engine.optim_parameters()), BATCHES[:3], 2, is_async=False)
    assert engine.statistics()["second_buffer_bytes"] == 0


def test_an_adversarial_device_finds_no_copy_that_could_be_overwritten(
    copies: str, engines: Engines
) -> None:
    from tests.support.adversaries import Adversaries

    expected_engine = engines(make_mlp(), TWO)
    train_steps(expected_engine, sgd(expected_engine.optim_parameters()), BATCHES, 2, is_async=True)
    adversaries = Adversaries(2, seed=1)
    engine = engines(make_mlp(), adversaries)
    train_steps(engine, sgd(engine.optim_parameters()), BATCHES, 2, is_async=True)
    TWO.check(engine_weights(engine), engine_weights(expected_engine))
    assert adversaries.faults == []
