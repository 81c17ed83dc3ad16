"""Plans a user reads, writes and asks for."""

from dataclasses import replace
from typing import Any

import pytest

from device_sets import DeviceSet
from engines import Engines
from models import make_mlp
from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.errors import PlanError
from roundpipe.plan.actions import Pass
from roundpipe.plan.costs import LayerCosts, Round
from roundpipe.plan.execute_plan import plan_for, plans_for

PLAN = ModelExecutePlan(fwd_plan=[range(4), range(4, 6)], bwd_plan=[range(6, 8), range(3, 6), range(3)])


def test_repr_is_one_line_and_str_a_table() -> None:
    assert repr(PLAN) == "ModelExecutePlan(F 0-3 | F 4-5 | X 6-7 | B 3-5 | B 0-2)"
    assert str(PLAN).splitlines() == [
        "visit  pass      layers",
        "    0  forward   0-3",
        "    1  forward   4-5",
        "    2  fused     6-7",
        "    3  backward  3-5",
        "    4  backward  0-2",
    ]


def test_rounds_of_each_run_type() -> None:
    F, X, B = Pass.FORWARD, Pass.FUSED, Pass.BACKWARD
    assert PLAN.rounds("fused", 1) == [
        [(F, range(4)), (F, range(4, 6)), (X, range(6, 8)), (B, range(3, 6)), (B, range(1, 3))]
    ]
    train = PLAN.for_run("train")
    assert train.rounds("train") == [
        [(F, range(4)), (F, range(4, 6)), (F, range(6, 8))],
        [(B, range(6, 8)), (B, range(3, 6)), (B, range(3))],
    ]
    assert PLAN.for_run("infer").rounds("infer") == train.rounds("train")[:1]


# Made by the planner.


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_auto_makes_valid_plans(run_type: Any, devices: int, engines: Engines) -> None:
    engine = engines(make_mlp(), DeviceSet(kind="virtual", count=devices))
    for min_stages in (1, 4, 50):
        plan = ModelExecutePlan.auto(run_type, engine, min_stages=min_stages)
        assert isinstance(plan, ModelExecutePlan)
        plan.check(run_type, 7)
        assert sum(map(len, plan.rounds(run_type))) >= min(min_stages, 4)


def test_auto_keeps_within_the_memory_limit(engines: Engines) -> None:
    engine = engines(make_mlp())
    layer_bytes = engine.statistics()["layer_bytes"]
    whole = ModelExecutePlan.auto("fused", engine)
    assert isinstance(whole, ModelExecutePlan)
    assert whole.bwd_plan == (range(7),)
    cut = ModelExecutePlan.auto("fused", engine, model_memory_limit=1.5 * sum(layer_bytes))
    assert isinstance(cut, ModelExecutePlan)
    assert len(cut.bwd_plan) > 1
    with pytest.raises(PlanError, match=r"layer \d alone needs .* 100 B is allowed"):
        ModelExecutePlan.auto("fused", engine, model_memory_limit=100)


def equal_layers(count: int, ms: float) -> LayerCosts:
    return LayerCosts(forward=(ms,) * count, backward=(2 * ms,) * count, weight_bytes=(100,) * count)


def slowest(plan: ModelExecutePlan, costs: LayerCosts) -> float:
    return max(sum(costs.forward[layer] for layer in stage) for stage in plan.fwd_plan)


ROUND = Round(num_devices=4, num_microbatches=8)


def test_several_models_share_the_target_for_their_slowest_stage() -> None:
    """A small model beside a large one is not cut finer than the large one needs."""
    small, large = equal_layers(6, 1.0), equal_layers(24, 2.0)
    plans = plans_for("infer", [(small, ROUND), (large, ROUND)], min_stages=1, upper_threshold=1.1)
    assert [plan.fwd_plan[0].start for plan in plans] == [0, 0]
    assert slowest(plans[0], small) <= slowest(plans[1], large)
    alone = plan_for("infer", small, replace(ROUND, overlaps=False))
    assert len(plans[0].fwd_plan) < len(alone.fwd_plan)


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
@pytest.mark.parametrize("min_stages", [1, 12])
def test_plans_for_several_models_are_valid(run_type: Any, min_stages: int) -> None:
    parts = [(equal_layers(count, ms), ROUND) for count, ms in ((1, 5.0), (7, 1.0), (12, 0.5))]
    plans = plans_for(run_type, parts, min_stages=min_stages, upper_threshold=1.1)
    for plan, (costs, _) in zip(plans, parts, strict=True):
        plan.check(run_type, costs.num_layers)
    visits = sum(len(passes) for plan in plans for passes in plan.rounds(run_type))
    assert visits >= min_stages


def test_the_threshold_saves_a_stage_that_would_be_nearly_empty() -> None:
    """Eleven layers at a target of ten: two stages, or one that is a tenth slower."""
    parts = [(equal_layers(11, 1.0), ROUND), (LayerCosts(forward=(10.0,) * 12, backward=(0.0,) * 12), ROUND)]
    strict, loose = (plans_for("infer", parts, min_stages=1, upper_threshold=factor)[0] for factor in (1.0, 1.1))
    assert [len(strict.fwd_plan), len(loose.fwd_plan)] == [2, 1]


def test_several_models_under_a_budget() -> None:
    parts = [(equal_layers(12, 1.0), replace(ROUND, budget_bytes=500)) for _ in range(2)]
    for plan in plans_for("fused", parts, min_stages=1, upper_threshold=1.1):
        plan.check("fused", 12)
        assert max(map(len, [*plan.fwd_plan, *plan.bwd_plan])) <= 4
    with pytest.raises(PlanError, match="smallest plan tried needs 200 B on a device, 150 B is allowed"):
        plans_for(
            "fused", [(equal_layers(12, 1.0), replace(ROUND, budget_bytes=150))] * 2, min_stages=1, upper_threshold=1
        )


def test_frozen_layers_leave_complete_plans() -> None:
    round_ = replace(ROUND, first_trained=5)
    for run_type in ("train", "fused"):
        plan_for(run_type, equal_layers(8, 1.0), round_).check(run_type, 8)
        for plan in plans_for(run_type, [(equal_layers(8, 1.0), round_)] * 2, min_stages=1, upper_threshold=1.1):
            plan.check(run_type, 8)


def test_auto_for_several_engines_gives_a_list(engines: Engines) -> None:
    several = [engines(make_mlp(num_linears=count)) for count in (2, 5)]
    plans = ModelExecutePlan.auto("train", *several)
    assert isinstance(plans, list)
    for plan, engine in zip(plans, several, strict=True):
        assert isinstance(engine, RoundPipe)
        plan.check("train", engine.statistics()["layers"])
