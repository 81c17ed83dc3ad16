"""What an engine measures while it runs, with a clock that only moves when a layer, a loss or a
copy says so."""

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.autoplan.free_memory import FreeMemory
from roundpipe.device.virtual import VirtualDevice, VirtualLane
from roundpipe.memory.slots import Slot, SlotPool
from roundpipe.plan.best import plan_for
from roundpipe.plan.costs import LayerCosts
from roundpipe.runtime.worker_pool import WorkerPool
from tests.support.device_sets import ONE, TWO
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, Batch, make_mlp, mlp_batch
from tests.support.reference import plain_call

FORWARD_MS, BACKWARD_MS, LOSS_MS, MS_PER_BYTE = 3.0, 5.0, 2.0, 0.001
PLAN = ModelExecutePlan([range(2)], [range(2, 4), range(2)])
MICROBATCHES = 4


class Clock:
    """Stands where virtual devices take the time from."""

    def __init__(self) -> None:
        self._ms = 0.0

    def perf_counter(self) -> float:
        return self._ms / 1e3

    def pass_by(self, ms: float) -> None:
        self._ms += ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("roundpipe.device.virtual.time", made)
    return made


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.pass_by(BACKWARD_MS)
        return gradient, None


class Slow(nn.Module):
    """A linear layer that takes time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self._clock = SimpleNamespace(
            clock=clock
        )  # not a module's own state, so that nothing copies it

    def forward(self, hidden: Tensor) -> Tensor:
        self._clock.clock.pass_by(FORWARD_MS)
        slowed: Tensor = _SlowBackward.apply(self.linear(hidden), self._clock.clock)
        return slowed


def slow_batch(clock: Clock) -> Batch:
    batch = mlp_batch(8)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        clock.pass_by(LOSS_MS)
        return batch.loss_fn(output, target)

    return batch._replace(loss_fn=loss_fn)


def costs_after(engine: RoundPipe, clock: Clock, calls: int, **settings: Any) -> LayerCosts:
    for _ in range(calls):
        run_batch(engine, slow_batch(clock), MICROBATCHES, **settings)
        engine.synchronize()
    return engine.planner.measured().costs()


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_every_part_of_every_layer_has_the_time_it_takes(
    grain: str, clock: Clock, engines: Engines
) -> None:
    """The loss counts with the last layer's backward. What a fused stage never recomputes is taken
    from its like."""
    engine = engines(nn.Sequential(*(Slow(clock) for _ in range(4))), ONE)
    costs = costs_after(engine, clock, 4, execute_plan=PLAN, recompute_grain=grain)
    assert costs.forward == pytest.approx([FORWARD_MS] * 4)
    assert costs.recompute == pytest.approx([FORWARD_MS] * 4)
    assert costs.backward == pytest.approx([*[BACKWARD_MS] * 3, BACKWARD_MS + LOSS_MS])


def test_nothing_is_timed_below_the_first_layer_that_trains(clock: Clock, engines: Engines) -> None:
    model = nn.Sequential(*(Slow(clock) for _ in range(4)))
    model[:3].requires_grad_(False)
    costs = costs_after(engines(model, ONE), clock, 4, execute_plan=PLAN)
    assert costs.forward == pytest.approx([FORWARD_MS] * 4)
    assert costs.backward == pytest.approx([0, 0, 0, BACKWARD_MS + LOSS_MS])


def test_the_first_call_which_compiles_and_allocates_is_not_timed(
    clock: Clock, engines: Engines
) -> None:
    engine = engines(nn.Sequential(*(Slow(clock) for _ in range(4))), ONE)
    estimate = engine.planner.measured().costs()
    costs = costs_after(engine, clock, 1, execute_plan=PLAN)
    assert (costs.forward, costs.backward) == (estimate.forward, estimate.backward)


def test_copy_rates_are_measured_each_way(
    clock: Clock, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_ = VirtualLane.copy_

    def slow_copy(self: VirtualLane, target: Tensor, source: Tensor) -> None:
        clock.pass_by(MS_PER_BYTE * source.nbytes)
        copy_(self, target, source)

    monkeypatch.setattr(VirtualLane, "copy_", slow_copy)
    engine = engines(nn.Sequential(*(Slow(clock) for _ in range(4))), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(4):
        costs = costs_after(engine, clock, 1, execute_plan=PLAN)
        engine.step(optimizer.step, is_async=False)  # so that weights have to go up again
    assert costs.up_ms_per_byte == pytest.approx(MS_PER_BYTE)
    assert costs.down_ms_per_byte == pytest.approx(MS_PER_BYTE)


def test_updates_are_timed(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    guessed = engine.planner.problem("fused", MICROBATCHES)[1].optimizer_ms
    run_batch(engine, mlp_batch(8), MICROBATCHES)
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    assert engine.planner.problem("fused", MICROBATCHES)[1].optimizer_ms not in (0.0, guessed)


def test_calls_that_are_not_timed_mark_nothing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hot path pays nothing."""
    marks: list[int] = []
    monkeypatch.setattr(VirtualLane, "mark", counted(VirtualLane.mark, marks))
    engine = engines(make_mlp(), TWO)
    plan = ModelExecutePlan([range(4)], [range(4, 7), range(4)])
    per_call = []
    for _ in range(18):
        marks.clear()
        run_batch(engine, mlp_batch(8), MICROBATCHES, execute_plan=plan)
        engine.synchronize()
        per_call.append(len(marks))
    assert [number for number, count in enumerate(per_call, 1) if count] == [2, 3, 4, 16]


def counted(
    mark: Callable[[VirtualLane], object], marks: list[int]
) -> Callable[[VirtualLane], object]:
    def wrapped(self: VirtualLane) -> object:
        marks.append(1)
        return mark(self)

    return wrapped


def test_plans_that_follow_measurements_change_no_bit(engines: Engines) -> None:
    """Times that jump up and down between calls, so that one plan follows the other."""
    batch, draws = mlp_batch(8), random.Random(0)
    expected = plain_call(make_mlp(), batch.split(MICROBATCHES), batch.loss_fn)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    engine, plans = engines(make_mlp(), TWO, model_run_config=config), set()
    for _ in range(24):
        engine.zero_grad()
        loss = run_batch(engine, batch)
        ONE.check(loss, expected.loss)
        ONE.check(engine_gradients(engine), expected.gradients)
        plans.add(repr(engine.execute_plan))
        for layer in range(7):
            for part in ("forward", "recompute", "backward"):
                for _ in range(5):
                    engine.planner.measured().record_time(part, layer, draws.choice([1.0, 50.0]))  # type: ignore[arg-type]
    assert len(plans) > 2


def test_only_the_first_call_of_a_shape_waits_for_its_plan(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later plans are made while devices are busy with the call that has gone before."""
    happened: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (happened.append(name), function(*args, **kwargs))[1]

    for who in ("autoplan.planner", "plan.best"):
        monkeypatch.setattr(f"roundpipe.{who}.plan_for", noted("plan", plan_for))
    monkeypatch.setattr(WorkerPool, "start", noted("start", WorkerPool.start))
    engine = engines(
        make_mlp(), TWO, model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    )
    for rows in (8, 8, 8, 8, 8, 800, 8):
        run_batch(engine, mlp_batch(rows))
        engine.synchronize()
        happened.append("end")
        engine.planner.measured().record_saved_bytes(0, 1 + 1000 * len(happened))
    calls = " ".join(happened).split(" end")[:-1]
    assert [call.split()[0] for call in calls] == ["plan", *["start"] * 4, "plan", "start"]
    assert calls.count(" start plan") > 1


def test_slots_are_neither_given_back_nor_made_while_a_plan_stays(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wait for lanes. Here layers turn out to keep too much, so that plans change."""
    dropped, taken = [0], [0]
    keep_only, take = SlotPool.keep_only, SlotPool.take

    def counted_keep_only(pool: SlotPool, most: Mapping[int, int]) -> None:
        before = pool.num_bytes
        keep_only(pool, most)
        dropped[0] += before - pool.num_bytes

    def counted_take(pool: SlotPool, num_bytes: int) -> Slot:
        before = pool.num_bytes
        slot = take(pool, num_bytes)
        taken[0] += pool.num_bytes - before
        return slot

    monkeypatch.setattr(FreeMemory, "resident_layers", lambda *_, **__: frozenset())
    monkeypatch.setattr(SlotPool, "keep_only", counted_keep_only)
    monkeypatch.setattr(SlotPool, "take", counted_take)
    devices = SimpleNamespace(argument=[VirtualDevice(0, 100_000)])
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    engine = engines(make_mlp(), devices, model_run_config=config)  # type: ignore[arg-type]
    plans, moved = [], []
    for number in range(12):
        plans.append(engine.execute_plan)
        dropped[0] = taken[0] = 0
        run_batch(engine, mlp_batch(8))
        engine.synchronize()
        moved.append(dropped[0] + taken[0] > 0)
        if number == 3:
            for layer in range(7):
                engine.planner.measured().record_saved_bytes(layer, 30_000)
    is_new = [number > 0 and plan != plans[number - 1] for number, plan in enumerate(plans)]
    assert any(is_new[4:])
    assert all(new for new, move in zip(is_new[1:], moved[1:], strict=True) if move)
