"""The peak that the planner predicts is the one that a device reaches."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines import Engines
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.plan.costs import StageSums
from roundpipe.plan.memory import predicted_peak
from roundpipe.runtime.executor import Executor

WIDTH, ROWS, MICROBATCHES = 128, 256, 4

PLANS = {
    "one fused stage": ModelExecutePlan([], [range(8)]),
    "half fused": ModelExecutePlan([range(4)], [range(4, 8), range(2, 4), range(2)]),
    "recompute in large stages": ModelExecutePlan([range(5)], [range(5, 8), range(3, 5), range(3)]),
    "many inputs kept": ModelExecutePlan(
        [range(2), range(2, 4), range(4, 6)], [range(6, 8), range(4, 6), range(2, 4), range(2)]
    ),
}


class Block(nn.Module):
    """As much activation memory per weight as in a transformer with short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class HeldBytes(TorchDispatchMode):
    """Counts the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        outputs = function(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.untyped_storage().data_ptr() not in given:
                self._add(output.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._alive:
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            self._alive[key] = weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self.now -= num_bytes
        del self._alive[key]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeldBytes]]:
    """What computes hold on the device, uploads left out, for the counter that is in the list."""
    counters: list[HeldBytes] = []
    compute = Executor._compute

    def counted(self: Executor, *args: Any) -> None:
        if not counters:
            return compute(self, *args)
        with counters[0]:
            return compute(self, *args)

    monkeypatch.setattr(Executor, "_compute", counted)
    yield counters
    counters.clear()


def make_engine(engines: Engines) -> RoundPipe:
    torch.manual_seed(0)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    return engines(nn.Sequential(*(Block() for _ in range(8))), model_run_config=config)


def run(engine: RoundPipe, plan: ModelExecutePlan | None, grain: Any = None) -> None:
    config = RoundPipeRunConfig(execute_plan=plan, recompute_grain=grain)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH)
    engine.forward_backward((x,), loss_fn=lambda output, _: output.square().sum(), run_config=config)
    engine.synchronize()


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", PLANS)
def test_the_predicted_peak_is_within_a_tenth(name: str, grain: Any, engines: Engines, held: list[HeldBytes]) -> None:
    engine = make_engine(engines)
    run(engine, PLANS[name], grain)
    counter = HeldBytes()
    held.append(counter)
    run(engine, PLANS[name], grain)
    held.clear()
    costs, round_ = engine.planner.problem("fused", MICROBATCHES, grain=grain)
    (passes,) = PLANS[name].rounds("fused")
    predicted = predicted_peak(passes, StageSums(costs), round_)
    slots = sum(engine.statistics()["slot_bytes"].values())
    assert predicted.slots == slots
    assert counter.peak + slots == pytest.approx(predicted.total, rel=0.1), predicted


def test_graphs_and_inputs_of_all_layers_are_measured_in_the_first_call(engines: Engines) -> None:
    """In forward visits, where nothing is kept, as in the fused stage: equal layers have equal graphs."""
    engine = make_engine(engines)
    assert not engine.planner.measured().knows_graphs
    run(engine, PLANS["half fused"])
    costs = engine.planner.measured().costs()
    assert engine.planner.measured().knows_graphs
    assert set(costs.input_bytes) == {4 * ROWS * WIDTH}
    # The first layer's input may be the caller's own memory, and the loss counts with the last layer.
    assert len(set(costs.saved_bytes[1:-1])) == 1
    assert costs.saved_bytes[0] <= costs.saved_bytes[1] < costs.saved_bytes[-1]


def test_a_plan_made_from_measurements_keeps_within_its_budget(engines: Engines, held: list[HeldBytes]) -> None:
    """Asked for half of what one fused stage would take."""
    engine = make_engine(engines)
    run(engine, PLANS["half fused"])
    costs, round_ = engine.planner.problem("fused", MICROBATCHES)
    (whole,) = PLANS["one fused stage"].rounds("fused")
    budget = predicted_peak(whole, StageSums(costs), round_).total / 2
    plan = ModelExecutePlan.auto("fused", engine, model_memory_limit=budget)
    assert isinstance(plan, ModelExecutePlan)
    counter = HeldBytes()
    run(engine, plan)
    held.append(counter)
    run(engine, plan)
    held.clear()
    predicted = predicted_peak(plan.rounds("fused")[0], StageSums(costs), round_)
    assert predicted.total <= budget
    assert counter.peak + predicted.slots <= 1.1 * budget
