"""Turns stages into what each device does, in order. Pure: the same arguments give the same
drawing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from .actions import Action, Op, Pass, Passes, StageRun
from .costs import Workload

if TYPE_CHECKING:
    from .execute_plan import ModelExecutePlan

NOWHERE: Mapping[tuple[range, range], int] = {}


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every device does in one call.

    ``actions[d]`` is device d's list; ``next_device`` is where the next call's first stage run
    goes, so that round robin carries on across calls.
    """

    stage_runs: tuple[StageRun, ...]
    actions: tuple[tuple[Action, ...], ...]
    next_device: int


def fused_passes(plan: "ModelExecutePlan", first_trained: int) -> Passes:
    """Forward stages, the fused stage, then backward stages."""
    fused = plan.bwd_plan[0]
    num_shares = sum(stage == fused for stage in plan.bwd_plan)
    return [
        *forward_passes(plan.fwd_plan),
        *[(Pass.FUSED, fused)] * num_shares,
        *backward_passes(plan.bwd_plan[num_shares:], first_trained),
    ]


def forward_passes(stages: Sequence[range]) -> Passes:
    return [(Pass.FORWARD, stage) for stage in stages]


def backward_passes(stages: Sequence[range], first_trained: int) -> Passes:
    """Nothing below the shallowest layer that needs a gradient is run; the stage that holds it
    starts there."""
    return [
        (Pass.BACKWARD, range(max(stage.start, first_trained), stage.stop))
        for stage in stages
        if stage.stop > first_trained
    ]


def saved_layers(passes: Passes) -> frozenset[int]:
    """The layers whose input a forward stage run must keep for a backward stage run."""
    return frozenset(layers.start for pass_, layers in passes if pass_ is Pass.BACKWARD)


def shares(num_microbatches: int, count: int) -> list[range]:
    """Consecutive microbatches for each of at most ``count`` stage runs, as equal as they can be,
    larger shares first."""
    count = min(count, num_microbatches)
    size, larger = divmod(num_microbatches, count)
    ends = [share * size + min(share, larger) for share in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


class Group(NamedTuple):
    """One of ``num_groups`` groups of devices, each of which makes all stage runs of ``rounds`` for
    its share."""

    num_groups: int
    rounds: list[Passes]
    workload: Workload


def group_of(rounds: Sequence[Passes], workload: Workload) -> Group:
    """Stage runs that are all made equally often, by devices that this divides, are rounds of
    several groups beside each other; any others are one group's."""
    counts = {len(list(same)) for passes in rounds for _, same in groupby(passes)}
    count = counts.pop() if len(counts) == 1 else 1
    if count == 1 or workload.num_devices % count or count > workload.num_microbatches:
        return Group(1, list(rounds), workload)
    return Group(
        count,
        [[stage_run for stage_run, _ in groupby(passes)] for passes in rounds],
        workload.of_share(count),
    )


def round_robin(
    passes: Passes,
    *,
    num_devices: int,
    num_microbatches: int,
    first_device: int,
    spilled: frozenset[int] = frozenset(),
    placed: Mapping[tuple[range, range], int] = NOWHERE,
) -> Schedule:
    """Stage runs go to devices in turn, starting at ``first_device``.

    Args:
        spilled: the layers whose kept input waits on the host and has to be fetched.
        placed: the devices of stage runs that have no choice, by layers and microbatches. The
            others' turns go on as if they were not there.
    """
    stage_runs: list[StageRun] = []
    next_device = first_device
    for stage, ((pass_, layers), same) in enumerate(groupby(passes)):
        for share in shares(num_microbatches, sum(1 for _ in same)):
            device = placed.get((layers, share))
            if device is None:
                device, next_device = next_device, (next_device + 1) % num_devices
            stage_runs.append(StageRun(pass_, stage, layers, device, share))
    return Schedule(
        stage_runs=tuple(stage_runs),
        actions=tuple(
            _device_actions([v for v in stage_runs if v.device == d], spilled)
            for d in range(num_devices)
        ),
        next_device=next_device,
    )


def _device_actions(stage_runs: list[StageRun], spilled: frozenset[int]) -> tuple[Action, ...]:
    """The next stage's upload is issued right after this stage's computes.

    A device works behind the thread that issues, so that upload overlaps these computes; issued
    earlier it could make them wait for the writing back of deeper layers.
    """
    actions: list[Action] = [Action(Op.UPLOAD, stage_run) for stage_run in stage_runs[:1]]
    for position, stage_run in enumerate(stage_runs):
        actions.extend(_computes(stage_run, spilled))
        actions.extend(
            Action(Op.UPLOAD, following) for following in stage_runs[position + 1 : position + 2]
        )
        if stage_run.pass_ is not Pass.FORWARD:
            actions.append(Action(Op.OFFLOAD, stage_run))
        actions.append(Action(Op.RELEASE, stage_run))
    return tuple(actions)


def _computes(stage_run: StageRun, spilled: frozenset[int]) -> Iterator[Action]:
    """Inputs that wait on the host come back one microbatch ahead, so that the copy overlaps a
    compute."""
    computes = [Action(Op.COMPUTE, stage_run, microbatch) for microbatch in stage_run.microbatches]
    if stage_run.pass_ is not Pass.BACKWARD or stage_run.layers.start not in spilled:
        yield from computes
        return
    fetches = [Action(Op.FETCH, stage_run, microbatch) for microbatch in stage_run.microbatches]
    yield fetches[0]
    for compute, ahead in zip_longest(computes, fetches[1:]):
        if ahead is not None:
            yield ahead
        yield compute
