"""Plans a user reads, writes and asks for."""

from dataclasses import replace
from typing import Any

import pytest

from roundpipe import ModelExecutePlan, RoundPipe
from roundpipe.errors import ConfigError, PlanError
from roundpipe.memory.slot_sizes import ALIGNMENT
from roundpipe.plan.actions import Pass
from roundpipe.plan.best import plan_for, plan_peak, plans_for, smallest_plan, step_ms
from roundpipe.plan.costs import LayerCosts, StageSums, Workload
from roundpipe.plan.execute_plan import RunType
from roundpipe.plan.memory import least_peak, predicted_peak
from roundpipe.plan.schedule import group_of
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines
from tests.support.models import make_mlp

PLAN = ModelExecutePlan(
    fwd_plan=[range(4), range(4, 6)], bwd_plan=[range(6, 8), range(3, 6), range(3)]
)


def test_repr_is_one_line_and_str_a_table() -> None:
    assert repr(PLAN) == "ModelExecutePlan(F 0-3 | F 4-5 | X 6-7 | B 3-5 | B 0-2)"
    assert str(PLAN).splitlines() == [
        "stage run  pass      layers",
        "    0  forward   0-3",
        "    1  forward   4-5",
        "    2  fused     6-7",
        "    3  backward  3-5",
        "    4  backward  0-2",
    ]


def test_a_stage_listed_twice_in_a_row_is_one_stage_in_two_shares() -> None:
    plan = ModelExecutePlan([range(4)], [*[range(4, 12)] * 2, range(4)])
    assert repr(plan) == "ModelExecutePlan(F 0-3 | X 4-11 x2 | B 0-3)"
    assert str(plan).splitlines() == [
        "stage run  pass      layers  share",
        "    0  forward   0-3",
        "    1  fused     4-11    1/2",
        "    2  fused     4-11    2/2",
        "    3  backward  0-3",
    ]
    plan.check("fused", 12)
    train = plan.for_run("train")
    assert [len(passes) for passes in train.rounds("train")] == [3, 3]
    train.check("train", 12)
    with pytest.raises(PlanError, match="layer 0 is in no stage"):
        ModelExecutePlan([range(4)], [range(4, 12), range(4), range(4, 12)]).check("fused", 12)


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
    cut = ModelExecutePlan.auto(
        "fused", engine, model_memory_limit=f"{int(1.5 * sum(layer_bytes))}B"
    )
    assert isinstance(cut, ModelExecutePlan)
    assert len(cut.bwd_plan) > 1
    with pytest.raises(PlanError, match=r"layer \d alone needs .* 100 B is allowed"):
        ModelExecutePlan.auto("fused", engine, model_memory_limit="100B")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"run_type": "training"}, "run_type is 'training'; use 'infer', 'train' or 'fused'"),
        ({"min_stages": 0}, "min_stages is 0; it must be at least 1"),
        ({"upper_threshold": 0.9}, "upper_threshold is 0.9; it must be at least 1"),
        ({"model_memory_limit": 0}, "model_memory_limit is 0; give a size with a unit"),
    ],
)
def test_plan_keys_that_make_no_sense_are_refused(
    arguments: dict[str, Any], fault: str, engines: Engines
) -> None:
    with pytest.raises((PlanError, ConfigError), match=fault):
        ModelExecutePlan.auto(arguments.pop("run_type", "fused"), engines(make_mlp()), **arguments)
    with pytest.raises(PlanError, match="was given no model"):
        ModelExecutePlan.auto("fused")


def test_stages_have_to_be_ranges() -> None:
    for stage in ([0, 1], range(0), range(0, 4, 2)):
        with pytest.raises(PlanError, match=r"bwd_plan: .* is not a range of consecutive layers"):
            ModelExecutePlan([range(2)], [stage])  # type: ignore[list-item]


def equal_layers(count: int, ms: float) -> LayerCosts:
    return LayerCosts(
        forward=(ms,) * count, backward=(2 * ms,) * count, weight_bytes=(100,) * count
    )


def slowest(plan: ModelExecutePlan, costs: LayerCosts) -> float:
    return max(sum(costs.forward[layer] for layer in stage) for stage in plan.fwd_plan)


ROUND = Workload(num_devices=4, num_microbatches=8)


# In shares.


def num_groups(plan: ModelExecutePlan, workload: Workload) -> int:
    return group_of(plan.rounds("fused" if plan.bwd_plan else "infer"), workload).num_groups


SHARING = replace(ROUND, num_devices=2, may_share=True)


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
def test_every_device_runs_a_model_that_fits_for_its_share(run_type: Any) -> None:
    """What one device would do, done by each for half of the microbatches, in half of the time."""
    costs = equal_layers(12, 1.0)
    alone = plan_for(run_type, costs, replace(SHARING, num_devices=1))
    shared = plan_for(run_type, costs, SHARING)
    assert shared == alone.shared(2)
    one, two = (
        step_ms(plan, run_type, costs, workload)
        for plan, workload in ((alone, ALONE), (shared, SHARING))
    )
    assert two == pytest.approx(one / 2)
    assert num_groups(plan_for(run_type, costs, replace(SHARING, may_share=False)), SHARING) == 1


ALONE = replace(SHARING, num_devices=1)


def test_what_does_not_fit_is_recomputed_in_shares() -> None:
    costs = replace(equal_layers(12, 1.0), saved_bytes=(300,) * 12, gradient_bytes=(200,) * 12)
    workload = replace(SHARING, limit_bytes=3500)
    plan = plan_for("fused", costs, workload)
    plan.check("fused", 12)
    assert num_groups(plan, workload) == 2
    assert len(set(plan.bwd_plan)) > 1
    assert plan_peak(plan, "fused", costs, workload).bytes.total <= 3500


def test_where_copies_are_slow_weights_go_up_once() -> None:
    """Shares would move every weight to each device, for half of the compute that hides it."""
    costs = replace(equal_layers(12, 1.0), up_ms_per_byte=0.4)
    assert num_groups(plan_for("fused", costs, SHARING), SHARING) == 1
    assert num_groups(plan_for("fused", replace(costs, up_ms_per_byte=0.01), SHARING), SHARING) == 2


def frozen_layers(count: int) -> LayerCosts:
    """Whose weights take longer to go up than to compute with."""
    return replace(
        equal_layers(count, 1.0),
        weight_bytes=(100,) * count,
        saved_bytes=(200,) * count,
        up_ms_per_byte=0.05,
    )


KEEPING = Workload(num_devices=1, num_microbatches=2, keeps_layers=True, limit_bytes=4096)


def test_layers_that_can_stay_on_a_device_are_planned_to() -> None:
    """More is recomputed, so that there is room for weights that would go up twice."""
    costs = frozen_layers(12)
    plan, other = (
        plan_for("fused", costs, KEEPING),
        plan_for("fused", costs, replace(KEEPING, keeps_layers=False)),
    )
    assert len(plan.bwd_plan[0]) < len(other.bwd_plan[0])
    compute = 2 * 12 * (1.0 + 2.0)
    assert (
        compute < step_ms(plan, "fused", costs, KEEPING) < step_ms(other, "fused", costs, KEEPING)
    )
    peak = plan_peak(plan, "fused", costs, KEEPING)
    (passes,) = plan.rounds("fused")
    everything = frozenset(range(12))
    total = predicted_peak(passes, StageSums(costs), KEEPING, peak.spilled, everything).total
    assert total <= KEEPING.limit_bytes


@pytest.mark.parametrize("limit", [3100, 1 << 40])
def test_layers_that_train_or_do_not_fit_are_not_planned_to_stay(limit: int) -> None:
    workload = replace(KEEPING, limit_bytes=limit)
    alone = replace(workload, keeps_layers=False)
    trained = replace(frozen_layers(12), offloaded_bytes=(100,) * 12)
    for costs in [trained, *([frozen_layers(12)] if limit == 3100 else [])]:
        assert plan_for("fused", costs, workload) == plan_for("fused", costs, alone)


def test_no_share_is_empty() -> None:
    workload = replace(SHARING, num_devices=8, num_microbatches=3)
    plan = plan_for("fused", equal_layers(12, 1.0), workload)
    assert num_groups(plan, workload) in (1, 2)


def test_shares_that_the_optimizer_would_only_wait_longer_for_are_not_made() -> None:
    """Overlapping rounds that are all shorter than an update; an update reads a gradient for every
    share."""
    assert (
        num_groups(
            plan_for("fused", equal_layers(12, 1.0), replace(SHARING, optimizer_ms=1e4)), SHARING
        )
        == 1
    )


def test_a_step_is_the_longer_of_round_and_update_or_both_in_turn() -> None:
    costs, whole = equal_layers(4, 1.0), ModelExecutePlan([], [range(4)])
    workload = Workload(num_devices=1, num_microbatches=5)
    assert step_ms(whole, "fused", costs, workload) == 60
    assert step_ms(whole, "fused", costs, replace(workload, optimizer_ms=90.0)) == 90
    assert (
        step_ms(whole, "fused", costs, replace(workload, optimizer_ms=90.0, overlaps=False)) == 150
    )
    assert (
        step_ms(ModelExecutePlan([range(4)]), "infer", costs, replace(workload, optimizer_ms=90.0))
        == 20
    )


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
    stage_runs = sum(len(passes) for plan in plans for passes in plan.rounds(run_type))
    assert stage_runs >= min_stages


def test_the_threshold_saves_a_stage_that_would_be_nearly_empty() -> None:
    """Eleven layers at a target of ten: two stages, or one that is a tenth slower."""
    parts = [
        (equal_layers(11, 1.0), ROUND),
        (LayerCosts(forward=(10.0,) * 12, backward=(0.0,) * 12), ROUND),
    ]
    strict, loose = (
        plans_for("infer", parts, min_stages=1, upper_threshold=factor)[0] for factor in (1.0, 1.1)
    )
    assert [len(strict.fwd_plan), len(loose.fwd_plan)] == [2, 1]


def test_several_models_under_a_limit() -> None:
    """Two slots, for the layer that runs and one on its way, are the least."""
    model = replace(equal_layers(12, 1.0), weight_bytes=(10 * ALIGNMENT,) * 12)
    parts = [(model, replace(ROUND, limit_bytes=50 * ALIGNMENT)) for _ in range(2)]
    for plan in plans_for("fused", parts, min_stages=1, upper_threshold=1.1):
        plan.check("fused", 12)
        assert max(map(len, [*plan.fwd_plan, *plan.bwd_plan])) <= 4
    tight = replace(ROUND, limit_bytes=15 * ALIGNMENT)
    with pytest.raises(
        PlanError,
        match=r"model 1 of 2: the smallest plan tried needs 5 KiB .*3.75 KiB is allowed; layer 0",
    ):
        plans_for("fused", [(model, tight)] * 2, min_stages=1, upper_threshold=1)


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
def test_what_fits_layer_by_layer_is_not_refused(run_type: RunType) -> None:
    """A forward that fills the device leaves no room for the backward after it."""
    costs = replace(
        equal_layers(60, 1.0),
        weight_bytes=(7 * ALIGNMENT,) * 60,
        gradient_bytes=(ALIGNMENT,) * 60,
        saved_bytes=(5 * ALIGNMENT,) * 60,
        input_bytes=(4 * ALIGNMENT,) * 60,
        up_ms_per_byte=1e-4,
    )
    workload = replace(ROUND, num_devices=1, num_microbatches=4)
    smallest = smallest_plan(run_type, 60)
    least = least_peak(
        [stage_run for stage_runs in smallest.rounds(run_type) for stage_run in stage_runs],
        StageSums(costs),
        workload,
    )
    for share in (1.0, 1.01, 1.1, 1.3, 1.6, 2.0, 3.0, 5.0, 8.0):
        tight = replace(workload, limit_bytes=share * least.total)
        plan = plan_for(run_type, costs, tight)
        assert plan_peak(plan, run_type, costs, tight).bytes.total <= tight.limit_bytes


def test_frozen_layers_leave_complete_plans() -> None:
    workload = replace(ROUND, first_trained=5)
    for run_type in ("train", "fused"):
        plan_for(run_type, equal_layers(8, 1.0), workload).check(run_type, 8)
        for plan in plans_for(
            run_type, [(equal_layers(8, 1.0), workload)] * 2, min_stages=1, upper_threshold=1.1
        ):
            plan.check(run_type, 8)


def test_auto_for_several_engines_gives_a_list(engines: Engines) -> None:
    several = [engines(make_mlp(num_linears=count)) for count in (2, 5)]
    plans = ModelExecutePlan.auto("train", *several)
    assert isinstance(plans, list)
    for plan, engine in zip(plans, several, strict=True):
        assert isinstance(engine, RoundPipe)
        plan.check("train", engine.statistics()["layers"])


def test_lists_may_be_assigned_later() -> None:
    """As scripts of the public system do; each assignment is checked as at construction."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(2)]
    plan.bwd_plan = [range(2, 4), range(2)]
    assert plan == ModelExecutePlan([range(2)], [range(2, 4), range(2)])
    plan.check("fused", 4)
    with pytest.raises(PlanError, match="bwd_plan: 3 is not a range"):
        plan.bwd_plan = [3]  # type: ignore[list-item]
    assert plan.bwd_plan == (range(2, 4), range(2))
    with pytest.raises(AttributeError, match="no 'forward_plan'"):
        plan.forward_plan = [range(4)]  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="layer"):
        ModelExecutePlan().check("infer", 4)
