"""The best plan for layers, devices and a limit: the one with the shortest predicted steps among
those that each way to make one gives."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

from ..errors import PlanError
from .actions import Pass
from .costs import LayerCosts, StageSums, Workload
from .execute_plan import ModelExecutePlan, RunType, completed, plan_of
from .kept_layers import with_all_resident
from .memory import Peak, fitted_peak
from .one_way import plan_one_way
from .predict import predicted_ms
from .schedule import forward_passes, group_of
from .search import MAX_STAGE_RUNS_TIMED, plan_fused
from .together import Member, plan_together

# A new plan has to be predicted this much faster, because measurements waver and a new plan starts
# cold.
_WORTH_CHANGING = 0.03
# Of the limit, what a forward may fill whose backward comes in a round of its own: what is fastest
# first.
_FORWARD_SHARES = (1.0, 0.5, 0.25)


def plan_for(run_type: RunType, costs: LayerCosts, workload: Workload) -> ModelExecutePlan:
    """The plan with the shortest predicted steps that fits into memory.

    Raises:
        PlanError: nothing fits; says what the smallest plan needs.
    """
    best: tuple[float, ModelExecutePlan] | None = None
    # Not the error itself: raised from here it would hold this frame, which holds it, and all
    # callers' with what they have on devices.
    failure = ""
    counts, resident = _share_counts(workload), with_all_resident(costs, workload)
    problems = [(costs, workload, MAX_STAGE_RUNS_TIMED)]
    if resident is not None:
        problems = [
            (costs, workload, MAX_STAGE_RUNS_TIMED * 3 // 4),
            (*resident, MAX_STAGE_RUNS_TIMED // 4),
        ]
    for (left, whole, max_stage_runs), num_shares in product(problems, counts):
        try:
            share = whole.of_share(num_shares)
            plan = _pipelined(run_type, left, share, max_stage_runs // len(counts)).shared(
                num_shares
            )
        except PlanError as error:
            failure = failure if best or left is not costs else str(error)
            continue
        ms = _step_ms(plan, run_type, left, whole)
        if best is None or ms < best[0]:
            best = ms, plan
    if best is None:
        raise PlanError(failure)
    return best[1]


def step_ms(
    plan: ModelExecutePlan, run_type: RunType, costs: LayerCosts, workload: Workload
) -> float:
    """Predicted time from step to step, without what the caller's own graph takes."""
    return _step_ms(plan, run_type, *_problem_of(plan, run_type, costs, workload))


def plan_peak(
    plan: ModelExecutePlan, run_type: RunType, costs: LayerCosts, workload: Workload
) -> Peak:
    """What the plan needs on one device beside layers that stay there, and what it has to keep on
    the host for that."""
    return _plan_peak(plan, run_type, *_problem_of(plan, run_type, costs, workload))


def _problem_of(
    plan: ModelExecutePlan, run_type: RunType, costs: LayerCosts, workload: Workload
) -> tuple[LayerCosts, Workload]:
    """With all layers resident, if the plan leaves room for that and is faster then."""
    resident = with_all_resident(costs, workload)
    if (
        resident is None
        or _plan_peak(plan, run_type, *resident).bytes.total > resident[1].limit_bytes
    ):
        return costs, workload
    is_faster = _step_ms(plan, run_type, *resident) < _step_ms(plan, run_type, costs, workload)
    return resident if is_faster else (costs, workload)


def _step_ms(
    plan: ModelExecutePlan, run_type: RunType, costs: LayerCosts, workload: Workload
) -> float:
    group = group_of(plan.rounds(run_type, workload.first_trained), workload)
    totals = StageSums(costs)
    round_ms = sum(predicted_ms(passes, totals, group.workload) for passes in group.rounds)
    return round_ms if run_type == "infer" else workload.step_ms(round_ms, group.num_groups)


def _plan_peak(
    plan: ModelExecutePlan, run_type: RunType, costs: LayerCosts, workload: Workload
) -> Peak:
    group = group_of(plan.rounds(run_type, workload.first_trained), workload)
    return fitted_peak(
        [stage_run for passes in group.rounds for stage_run in passes],
        StageSums(costs),
        group.workload,
    )


def _share_counts(workload: Workload) -> list[int]:
    """Ways to divide devices into groups that each run the whole model for a share, the largest
    groups last.

    One device a group, one group, and one way between, because each is a search of its own.
    """
    if not workload.may_share:
        return [1]
    devices = workload.num_devices
    between = max(n for n in range(1, devices + 1) if devices % n == 0 and n * n <= devices)
    return sorted(
        (n for n in {1, between, devices} if n <= workload.num_microbatches), reverse=True
    )


def _pipelined(
    run_type: RunType, costs: LayerCosts, workload: Workload, max_stage_runs: int
) -> ModelExecutePlan:
    """A plan that stage runs each stage once."""
    if run_type == "fused":
        return plan_fused(costs, workload, max_stage_runs)
    if run_type == "infer":
        return ModelExecutePlan(plan_one_way(Pass.FORWARD, costs, workload))
    return _there_and_back(costs, workload)


def _there_and_back(costs: LayerCosts, workload: Workload) -> ModelExecutePlan:
    """The backward finds what the forward has kept, in slots too, so the forward may have to be
    content with less."""
    failure = ""
    for share in _FORWARD_SHARES:
        try:
            forward = plan_one_way(
                Pass.FORWARD, costs, replace(workload, limit_bytes=workload.limit_bytes * share)
            )
            backward = plan_one_way(Pass.BACKWARD, costs, workload, before=forward_passes(forward))
            return ModelExecutePlan(forward, completed(backward))
        except PlanError as error:
            failure = failure or str(error)  # not the error itself, see `plan_for`
    smallest = smallest_plan("train", costs.num_layers)
    if _plan_peak(smallest, "train", costs, workload).bytes.total <= workload.limit_bytes:
        return smallest
    raise PlanError(failure)


def within_host(
    plan: ModelExecutePlan,
    run_type: RunType,
    costs: LayerCosts,
    workload: Workload,
    host_bytes: float,
) -> ModelExecutePlan:
    """``plan``, if no more than ``host_bytes`` of kept inputs wait on the host, else one that
    recomputes more or from fewer of them: the fastest with which that is so, or the one with which
    the fewest do.

    A stage of several layers keeps one input. The others it makes again, in the same recompute.
    """
    waiting = plan_peak(plan, run_type, costs, workload).waiting
    if waiting <= host_bytes or run_type != "fused":
        return plan
    best = (True, float(waiting), plan)
    fused = plan.bwd_plan[0]
    if list(plan.bwd_plan).count(fused) > 1:
        return plan  # stages in shares keep what each share needs
    tops = {costs.num_layers - len(fused) * share // 4 for share in (4, 3, 2, 1)}
    for top in sorted(top for top in tops if 0 < top < costs.num_layers):
        for size in range(1, top + 1):
            count = -(-top // size)
            if size > 1 and count == -(-top // (size - 1)):
                continue
            cuts = [top * number // count for number in range(count + 1)]
            below = [range(a, b) for a, b in pairwise(cuts)]
            ahead = list(plan.fwd_plan) if top == fused.start else below
            other = ModelExecutePlan(ahead, [range(top, costs.num_layers), *below[::-1]])
            peak = plan_peak(other, run_type, costs, workload)
            if peak.bytes.total > workload.limit_bytes:
                continue
            is_over = peak.waiting > host_bytes
            ms = step_ms(other, run_type, costs, workload)
            best = min(best, (is_over, peak.waiting if is_over else ms, other), key=_first_two)
    return best[2]


def _first_two(found: tuple[bool, float, ModelExecutePlan]) -> tuple[bool, float]:
    return found[:2]


def smallest_plan(run_type: RunType, num_layers: int) -> ModelExecutePlan:
    """One layer in every stage: what needs least of a device, whatever layers turn out to need."""
    layers = [range(layer, layer + 1) for layer in range(num_layers)]
    return ModelExecutePlan(layers[:-1], layers[::-1]).for_run(run_type)


def better_plan(
    run_type: RunType,
    plan: ModelExecutePlan,
    costs: LayerCosts,
    workload: Workload,
    *,
    is_refuted: bool,
) -> ModelExecutePlan:
    """``plan``, or a new one that is clearly faster or needed because ``plan`` does not fit any
    more.

    Args:
        is_refuted: ``plan`` has run out of memory.
    """
    try:
        new = plan_for(run_type, costs, workload)
    except PlanError:
        # One that has run is no reason to stop, whatever the prediction says.
        return smallest_plan(run_type, costs.num_layers) if is_refuted else plan
    does_fit = plan_peak(plan, run_type, costs, workload).bytes.total <= workload.limit_bytes
    old_ms, new_ms = (step_ms(one, run_type, costs, workload) for one in (plan, new))
    return plan if does_fit and new_ms >= old_ms * (1 - _WORTH_CHANGING) else new


def plans_for(
    run_type: RunType,
    parts: Sequence[tuple[LayerCosts, Workload]],
    *,
    min_stages: int,
    upper_threshold: float,
) -> list[ModelExecutePlan]:
    """Plans for models that run one after another, see ``plan_together``."""
    together = plan_together(
        [
            Member(costs, workload, run_type != "infer", run_type == "fused")
            for costs, workload in parts
        ],
        min_stages=min_stages,
        upper_threshold=upper_threshold,
    )
    return list(map(plan_of, together))
