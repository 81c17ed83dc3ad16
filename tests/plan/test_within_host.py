"""Plans under a limit of what kept inputs may take on the host."""

from itertools import pairwise

import pytest

from roundpipe.plan.best import plan_for, plan_peak, step_ms, within_host
from roundpipe.plan.costs import LayerCosts, Workload
from roundpipe.plan.execute_plan import ModelExecutePlan

LAYERS, MICROBATCHES, INPUT = 24, 4, 2000
COSTS = LayerCosts(
    forward=(1.0,) * LAYERS,
    backward=(2.0,) * LAYERS,
    weight_bytes=(1 << 10,) * LAYERS,
    gradient_bytes=(1 << 10,) * LAYERS,
    saved_bytes=(1 << 10,) * LAYERS,
    input_bytes=(INPUT,) * LAYERS,
)
WORKLOAD = Workload(num_devices=1, num_microbatches=MICROBATCHES, limit_bytes=1 << 20)
ALONE = [range(layer, layer + 1) for layer in range(LAYERS)]
EACH_LAYER = ModelExecutePlan(ALONE[:16], [range(16, LAYERS), *ALONE[:16][::-1]])


def waiting(plan: ModelExecutePlan, workload: Workload = WORKLOAD) -> int:
    return plan_peak(plan, "fused", COSTS, workload).waiting


def tight(more: int = 0) -> Workload:
    """A device that has room for the plan, but for kept inputs, and ``more`` bytes."""
    limit = plan_peak(
        EACH_LAYER, "fused", COSTS, Workload(num_devices=1, num_microbatches=4, limit_bytes=0.0)
    ).bytes.total
    return Workload(num_devices=1, num_microbatches=4, limit_bytes=limit + more)


def test_a_plan_that_keeps_little_stays() -> None:
    workload = tight()
    some = waiting(EACH_LAYER, workload)
    assert some == 16 * INPUT * MICROBATCHES
    assert within_host(EACH_LAYER, "fused", COSTS, workload, some) is EACH_LAYER


@pytest.mark.parametrize("share", [0.9, 0.5])
def test_larger_stages_keep_fewer_inputs_in_the_same_time(share: float) -> None:
    """For two slots and gradients more, which is less than an input of all microbatches."""
    workload = tight(4 << 10)
    allowed = share * waiting(EACH_LAYER, workload)
    plan = within_host(EACH_LAYER, "fused", COSTS, workload, allowed)
    plan.check("fused", LAYERS)
    peak = plan_peak(plan, "fused", COSTS, workload)
    assert peak.waiting <= allowed
    assert peak.bytes.total <= workload.limit_bytes
    assert step_ms(plan, "fused", COSTS, workload) <= 1.001 * step_ms(
        EACH_LAYER, "fused", COSTS, workload
    )
    borders = sorted(stage.start for stage in plan.bwd_plan)
    assert max(b - a for a, b in pairwise([*borders, LAYERS])) > 1


def test_a_smaller_fused_stage_leaves_room_for_inputs() -> None:
    workload = tight(4 << 10)
    allowed = 0.25 * waiting(EACH_LAYER, workload)
    plan = within_host(EACH_LAYER, "fused", COSTS, workload, allowed)
    assert waiting(plan, workload) <= allowed
    assert len(plan.bwd_plan[0]) < len(EACH_LAYER.bwd_plan[0])


def test_what_cannot_be_is_come_near_to() -> None:
    workload = tight()
    plan = within_host(EACH_LAYER, "fused", COSTS, workload, 0)
    assert 0 < waiting(plan, workload) <= waiting(EACH_LAYER, workload) / 2
    assert plan_peak(plan, "fused", COSTS, workload).bytes.total <= workload.limit_bytes


def test_ample_memory_keeps_the_best_plan() -> None:
    plan = plan_for("fused", COSTS, WORKLOAD)
    assert within_host(plan, "fused", COSTS, WORKLOAD, 1 << 40) is plan
