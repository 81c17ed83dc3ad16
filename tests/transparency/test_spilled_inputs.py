"""Kept inputs that a device has no room for wait on the host; where they wait changes nothing.

The devices of these tests say that they hold next to nothing, so that every kept input is spilled,
and they copy late and poison what is used again, so that a missing wait shows.
"""

import copy
import gc
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.testing.lanes import AdversarialLane
from tests.support.adversaries import Adversaries, FullDevice
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import LLAMA, MLP_WIDTH, Batch, make_mlp, mlp_batch
from tests.support.reference import plain_call

MICROBATCHES, ROWS = 4, 12
PLAN = ModelExecutePlan([range(3), range(3, 5)], [range(5, 7), range(4, 5), range(2, 4), range(2)])
COUNTS = [1, 2, 3]


@pytest.fixture(params=COUNTS, ids=lambda count: f"adversarial{count}")
def full(request: pytest.FixtureRequest) -> Iterator[Adversaries]:
    """Devices without room."""
    devices = Adversaries(request.param, seed=request.param, kind=FullDevice)
    yield devices
    assert devices.faults == []


def spill_bytes(engine: RoundPipe) -> int:
    num_bytes: int = engine.statistics()["spill_bytes"]
    return num_bytes


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_fused_call(grain: str, full: Adversaries, engines: Engines) -> None:
    batch = mlp_batch(ROWS)
    expected = plain_call(make_mlp(), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(make_mlp(), full)  # type: ignore[arg-type]
    for _ in range(3):
        engine.zero_grad()
        loss = run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN, recompute_grain=grain)
        ONE.check(loss, expected.loss)
        ONE.check(engine_gradients(engine), expected.gradients)
    assert spill_bytes(engine) > 0


def test_forward_and_backward_apart(full: Adversaries, engines: Engines) -> None:
    """What waits on the host waits there between the two calls."""
    batch = mlp_batch(ROWS)
    expected = plain_call(make_mlp(), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(make_mlp(), full)  # type: ignore[arg-type]
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=PLAN)
    outputs = engine(*batch.args, roundpipe_run_config=config)
    pieces = zip(outputs.chunk(MICROBATCHES), batch.label.chunk(MICROBATCHES), strict=True)
    torch.stack([batch.loss_fn(*piece) for piece in pieces]).sum().backward()
    ONE.check(engine_gradients(engine), expected.gradients)
    assert spill_bytes(engine) > 0


def test_a_model_whose_layers_hand_on_more_than_activations(
    full: Adversaries, engines: Engines
) -> None:
    """Masks and positions pass through all layers as one tensor, so they stay."""
    batch = LLAMA.batch(8, 0)
    expected = plain_call(LLAMA.make(), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(LLAMA.make(), full)  # type: ignore[arg-type]
    plan = ModelExecutePlan([range(3)], [range(3, 6), range(1, 3), range(1)])
    loss = run_batch(engine, batch, MICROBATCHES, execute_plan=plan)
    ONE.check(loss, expected.loss)
    ONE.check(engine_gradients(engine), expected.gradients)


class Transposing(nn.Module):
    """Its output is dense, but not contiguous; CPU kernels round differently on another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        rows: Tensor = self.linear(hidden).t().contiguous().t()
        return rows


def test_strides_come_back(full: Adversaries, engines: Engines) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Transposing() for _ in range(7)))
    batch = mlp_batch(ROWS)
    expected = plain_call(copy.deepcopy(model), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(model, full)  # type: ignore[arg-type]
    loss = run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN)
    ONE.check(loss, expected.loss)
    ONE.check(engine_gradients(engine), expected.gradients)


def test_random_plans(full: Adversaries, engines: Engines) -> None:
    batch = mlp_batch(ROWS)
    expected = plain_call(make_mlp(), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(make_mlp(), full)  # type: ignore[arg-type]
    for seed in range(6):
        draws = random.Random(seed)
        fused = draws.randint(1, 6)
        border = draws.randint(1, fused)
        backward = [range(a, b) for a, b in ((border, fused), (0, border)) if a < b]
        plan = ModelExecutePlan([range(fused)], [range(fused, 7), *backward])
        engine.zero_grad()
        run_batch(
            engine,
            batch,
            MICROBATCHES,
            execute_plan=plan,
            recompute_grain=draws.choice(["stage", "layer"]),
        )
        ONE.check(engine_gradients(engine), expected.gradients)


def test_host_memory_is_used_again_from_call_to_call(engines: Engines) -> None:
    """Also that of calls that failed, and of outputs nobody called backward on."""
    batch = mlp_batch(ROWS)
    engine = engines(make_mlp(), Adversaries(2, kind=FullDevice))  # type: ignore[arg-type]
    run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN)
    engine.synchronize()
    first = spill_bytes(engine)
    for _ in range(3):
        drop_a_failed_call(engine, batch)
        engine(
            *batch.args,
            roundpipe_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=PLAN),
        )
        gc.collect()
        run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN)
        engine.synchronize()
    # Forward and backward apart keep the input of the last stage too.
    assert spill_bytes(engine) <= 2 * first


def test_what_another_plan_needed_is_given_back(engines: Engines) -> None:
    batch = mlp_batch(ROWS)
    engine = engines(make_mlp(), Adversaries(2, kind=FullDevice))  # type: ignore[arg-type]
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.01)
    alone = [range(layer, layer + 1) for layer in range(7)]
    every_layer = ModelExecutePlan([range(6)], alone[::-1])
    one_layer = ModelExecutePlan([range(6)], [range(6, 7), range(6)])
    sizes = []
    for plan in (every_layer, *[one_layer] * 5):
        run_batch(engine, batch, MICROBATCHES, execute_plan=plan)
        engine.step(optimizer.step, is_async=False)
        sizes.append(spill_bytes(engine))
    assert sizes[-1] == sizes[0] / 6


def drop_a_failed_call(engine: RoundPipe, batch: Batch) -> None:
    """In a function of its own, because a kept exception keeps what its frames hold."""

    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        run_batch(engine, batch._replace(loss_fn=failing), MICROBATCHES, execute_plan=PLAN)


REMOVALS = {
    "an input is sent when it is made": (AdversarialLane.wait, "down"),
    "an input is kept until it is sent": (AdversarialLane.borrow, "down"),
    "an input comes back when it has arrived on the host": (AdversarialLane.wait, "up"),
    "a recompute waits for its input": (AdversarialLane.wait, "compute"),
}


@pytest.mark.parametrize("rule", REMOVALS)
def test_without_one_of_its_waits_the_numbers_are_wrong(
    rule: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the case is the rule that is broken."""
    method, kind = REMOVALS[rule]
    left_out = []

    def filtered(lane: AdversarialLane, *args: Any) -> None:
        if Path(sys._getframe(1).f_code.co_filename).stem == "spill" and lane.kind == kind:
            left_out.append(kind)
        else:
            method(lane, *args)

    monkeypatch.setattr(AdversarialLane, method.__name__, filtered)
    devices = Adversaries(1, kind=FullDevice)
    engine = engines(make_mlp(), devices)  # type: ignore[arg-type]
    run_batch(engine, mlp_batch(ROWS), MICROBATCHES, execute_plan=PLAN)
    gradients = engine_gradients(engine)
    assert left_out, "the wait is not where this test looks for it"
    assert any(gradient.isnan().any() for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["down", "up"])
def test_a_copy_that_fails_leaves_nothing_behind(
    kind: str, full: Adversaries, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way to the host the call fails; on the way back it may have returned, then the next
    call tells."""
    batch, copy_ = mlp_batch(ROWS), AdversarialLane.copy_
    expected = plain_call(make_mlp(), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(make_mlp(), full)  # type: ignore[arg-type]
    left = [3]

    def failing(lane: AdversarialLane, *args: Any) -> None:
        if Path(sys._getframe(1).f_code.co_filename).stem == "spill" and lane.kind == kind:
            left[0] -= 1
            if left[0] == 0:
                raise ArithmeticError("on purpose")
        copy_(lane, *args)

    monkeypatch.setattr(AdversarialLane, "copy_", failing)

    def call() -> None:
        run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN)
        engine.synchronize()

    with pytest.raises(ArithmeticError):
        call()
    run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN)
    ONE.check(engine_gradients(engine), expected.gradients)
