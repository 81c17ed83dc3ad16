"""What the planner chooses: the shortest predicted round under a memory limit."""

from dataclasses import replace

import pytest

from roundpipe import ModelExecutePlan
from roundpipe.errors import PlanError
from roundpipe.plan.actions import Pass, Passes
from roundpipe.plan.costs import LayerCosts, StageSums, Workload
from roundpipe.plan.execute_plan import plan_of
from roundpipe.plan.memory import fitted_peak, predicted_peak
from roundpipe.plan.one_way import plan_one_way
from roundpipe.plan.partition import Sizes
from roundpipe.plan.predict import least_period_ms, period_ms, predicted_ms, round_ms
from roundpipe.plan.schedule import fused_passes
from roundpipe.plan.search import MAX_STAGE_RUNS_TIMED, Search, plan_fused

MIB = 2**20


def stage_runs(plan: ModelExecutePlan, first_trained: int = 0) -> Passes:
    """Those of the plan that is made of them."""
    return fused_passes(plan, first_trained)


def blocks(
    count: int, *, saved: int = 40 * MIB, weights: int = 10 * MIB, **more: float
) -> LayerCosts:
    """Equal blocks; 3 ms for a forward-and-backward, 4 with recompute in between."""
    return LayerCosts(
        forward=(1.0,) * count,
        backward=(2.0,) * count,
        weight_bytes=(weights,) * count,
        gradient_bytes=(2 * weights,) * count,
        saved_bytes=(saved,) * count,
        input_bytes=(2 * MIB,) * count,
        **more,  # type: ignore[arg-type]
    )


ALONE = Workload(num_devices=1, num_microbatches=4)


def test_one_device_and_enough_memory_give_one_fused_stage() -> None:
    """Nothing is recomputed, everything goes up once."""
    for overlaps in (False, True):
        stages = plan_fused(blocks(24), replace(ALONE, overlaps=overlaps))
        assert stages.fwd_plan == ()
        assert stages.bwd_plan == (range(24),)


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
def test_the_fused_stage_is_as_large_as_memory_allows(overlaps: bool) -> None:
    """With less memory it shrinks, layer by layer; what lies below is recomputed, in stages that
    fit too."""
    costs, fused_sizes = blocks(24), []
    for limit in range(2600 * MIB, 300 * MIB, -100 * MIB):
        workload = replace(ALONE, overlaps=overlaps, limit_bytes=limit)
        stages = plan_fused(costs, workload)
        assert fitted_peak(stage_runs(stages), StageSums(costs), workload).bytes.total <= limit
        fused_sizes.append(len(stages.bwd_plan[0]))
    assert fused_sizes[0] == 24
    assert fused_sizes == sorted(fused_sizes, reverse=True)
    assert len(set(fused_sizes)) > 10
    assert fused_sizes[-1] < 6


def test_a_limit_one_byte_smaller_costs_a_layer() -> None:
    costs = blocks(8)
    whole = predicted_peak([(Pass.FUSED, range(8))], StageSums(costs), ALONE).total
    assert len(plan_fused(costs, replace(ALONE, limit_bytes=whole)).bwd_plan[0]) == 8
    assert len(plan_fused(costs, replace(ALONE, limit_bytes=whole - 1)).bwd_plan[0]) == 7


def test_recompute_by_layer_allows_larger_backward_stages() -> None:
    costs, workload = blocks(24), replace(ALONE, limit_bytes=700 * MIB)
    by_stage, by_layer = (
        plan_fused(costs, replace(workload, grain=grain)) for grain in ("stage", "layer")
    )
    assert max(map(len, by_layer.bwd_plan[1:])) > max(map(len, by_stage.bwd_plan[1:]))


def test_a_layer_too_large_by_itself_is_named_with_both_numbers() -> None:
    costs = replace(blocks(5), saved_bytes=(MIB, MIB, MIB, 3000 * MIB, MIB))
    with pytest.raises(
        PlanError, match=r"layer 3 alone needs 2\.959 GiB.*weights 10 MiB.*0\.9766 GiB is allowed"
    ):
        plan_fused(costs, replace(ALONE, limit_bytes=1000 * MIB))


def test_a_model_whose_kept_inputs_do_not_fit_is_refused_with_what_they_need() -> None:
    costs = replace(blocks(12), input_bytes=(500 * MIB,) * 12)
    with pytest.raises(
        PlanError, match=r"smallest plan tried .*boundaries .*, 1\.465 GiB is allowed"
    ):
        plan_fused(costs, replace(ALONE, limit_bytes=1500 * MIB))


def test_frozen_layers_at_the_bottom_are_only_run_forward() -> None:
    """The plan is complete all the same, for a later call in which they train."""
    workload = Workload(num_devices=2, num_microbatches=4, first_trained=5)
    stages = plan_fused(blocks(8), workload)
    assert stages.bwd_plan[-1].start == 0
    assert all(
        layers.start >= 5 for pass_, layers in stage_runs(stages, 5) if pass_ is Pass.BACKWARD
    )
    only_head = plan_fused(blocks(8), replace(workload, first_trained=7))
    assert [pass_ for pass_, _ in stage_runs(only_head, 7)].count(Pass.BACKWARD) == 0


@pytest.mark.parametrize("first_trained", range(8))
@pytest.mark.parametrize("fused", range(1, 9))
def test_cuts_next_to_one_cover_what_it_covers(fused: int, first_trained: int) -> None:
    """Also if the fused stage reaches below what trains, so that there is no backward stage."""
    below = 8 - fused
    sizes = Sizes(
        (below,) if below else (), fused, (below - first_trained,) if below > first_trained else ()
    )
    neighbours = list(sizes.neighbours(first_trained))
    assert {cut.fused for cut in neighbours} - {fused} == {fused - 1, fused + 1} - {0, 9}
    for cut in neighbours:
        passes = cut.passes(8, first_trained)
        plan_of(passes).check("fused", 8)
        assert passes == stage_runs(plan_of(passes), first_trained)
        ahead = [layer for pass_, stage in passes if pass_ is Pass.FORWARD for layer in stage]
        back = [layer for pass_, stage in passes[::-1] if pass_ is Pass.BACKWARD for layer in stage]
        assert [*ahead, *range(8 - cut.fused, 8)] == list(range(8))
        assert back == list(range(first_trained, 8 - cut.fused))


@pytest.mark.parametrize("first_trained", range(9))
def test_every_search_over_frozen_layers_finds_a_plan(first_trained: int) -> None:
    for limit in (300 * MIB, 600 * MIB):
        workload = Workload(
            num_devices=2,
            num_microbatches=4,
            first_trained=first_trained,
            limit_bytes=limit,
            min_stages=6,
        )
        stages = plan_fused(blocks(8), workload)
        stages.check("fused", 8)


@pytest.mark.parametrize(("min_stages", "expected"), [(1, 1), (4, 4), (9, 9), (100, 9)])
def test_min_stages_holds_while_there_are_layers(min_stages: int, expected: int) -> None:
    stages = plan_fused(blocks(5), replace(ALONE, min_stages=min_stages))
    assert len(stages.fwd_plan) + len(stages.bwd_plan) == expected


def test_a_stage_run_takes_the_larger_of_its_compute_and_its_copies() -> None:
    slow = blocks(12, up_ms_per_byte=1.0 / MIB, down_ms_per_byte=1.0 / MIB)
    totals = StageSums(slow)
    assert totals.stage_run_ms(Pass.FORWARD, range(2), 4) == 20 / 4
    assert totals.stage_run_ms(Pass.FUSED, range(2), 4) == 40 / 4
    assert totals.stage_run_ms(Pass.FORWARD, range(2), 100) == 2


def test_sync_rounds_begin_and_end_with_small_stages() -> None:
    """They are what the other devices wait for."""
    stages = plan_fused(blocks(64), Workload(num_devices=4, num_microbatches=8, overlaps=False))
    forward, backward = [len(s) for s in stages.fwd_plan], [len(s) for s in stages.bwd_plan]
    assert forward[0] == min(forward) < max(forward)
    assert backward[-1] == min(backward)


def test_async_rounds_come_within_a_percent_of_no_bubble() -> None:
    costs, workload = blocks(48), Workload(num_devices=4, num_microbatches=8)
    passes = stage_runs(plan_fused(costs, workload))
    totals = StageSums(costs)
    compute = sum(totals.compute_ms(*stage_run) for stage_run in passes) * workload.num_microbatches
    assert predicted_ms(passes, totals, workload) < 1.01 * compute / workload.num_devices


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("limit", [float("inf"), 900 * MIB], ids=["ample", "tight"])
def test_planning_a_hundred_layers_takes_little_work(limit: float, overlaps: bool) -> None:
    """About 40 ms on one core; counted, because a clock in a test is wrong on a busy machine."""
    search = Search(
        blocks(100),
        Workload(num_devices=8, num_microbatches=16, overlaps=overlaps, limit_bytes=limit),
    )
    search.run()
    assert search.stage_runs_timed <= 1.1 * MAX_STAGE_RUNS_TIMED
    assert search.best


def test_the_same_problem_has_the_same_plan() -> None:
    workload = Workload(num_devices=3, num_microbatches=6, limit_bytes=900 * MIB)
    assert plan_fused(blocks(30), workload) == plan_fused(blocks(30), workload)


def test_the_design_formula_for_equal_stages() -> None:
    """``(M * S + N * (N - 1)) * slowest / N`` where N divides S."""
    workload = Workload(num_devices=4, num_microbatches=6)
    assert round_ms([5.0] * 8, workload) == (6 * 8 + 4 * 3) * 5.0 / 4
    assert (
        period_ms([5.0] * 8, 3, workload) == least_period_ms([5.0] * 8, workload) == 6 * 8 * 5.0 / 4
    )


def test_rounds_of_one_direction() -> None:
    """Backward alone recomputes everything and ends in small stages; on one device nothing is cut
    without need."""
    costs = blocks(16)
    assert plan_one_way(Pass.FORWARD, costs, ALONE) == (range(16),)
    assert plan_one_way(Pass.BACKWARD, costs, ALONE) == (range(16),)
    several = Workload(num_devices=4, num_microbatches=5, overlaps=False)
    for pass_ in (Pass.FORWARD, Pass.BACKWARD):
        stages = plan_one_way(pass_, costs, several)
        assert sorted(layer for stage in stages for layer in stage) == list(range(16))
        assert len(stages) >= 4
    tight = replace(ALONE, limit_bytes=100 * MIB)
    assert len(plan_one_way(Pass.FORWARD, costs, tight)) > 1
    with pytest.raises(PlanError, match=r"smallest plan tried needs .*, 20 MiB is allowed"):
        plan_one_way(Pass.FORWARD, costs, replace(ALONE, limit_bytes=20 * MIB))
