"""Turns stages into what each device does, in order. Pure: the same arguments give the same drawing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from .actions import Action, Op, Pass, Passes, Visit
from .costs import Round

if TYPE_CHECKING:
    from .execute_plan import ModelExecutePlan


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every device does in one call.

    ``actions[d]`` is device d's list; ``next_device`` is where the next call's first visit goes, so that round robin
    carries on across calls.
    """

    visits: tuple[Visit, ...]
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
    """Nothing below the shallowest layer that needs a gradient is visited; the stage that holds it starts there."""
    return [
        (Pass.BACKWARD, range(max(stage.start, first_trained), stage.stop))
        for stage in stages
        if stage.stop > first_trained
    ]


def saved_layers(passes: Passes) -> frozenset[int]:
    """The layers whose input a forward visit must keep for a backward visit."""
    return frozenset(layers.start for pass_, layers in passes if pass_ is Pass.BACKWARD)


def shares(num_microbatches: int, count: int) -> list[range]:
    """Consecutive microbatches for each of at most ``count`` visits, as equal as they can be, larger shares first."""
    count = min(count, num_microbatches)
    size, larger = divmod(num_microbatches, count)
    ends = [share * size + min(share, larger) for share in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(ends)]


class Group(NamedTuple):
    """One of ``num_groups`` groups of devices, each of which makes all visits of ``rounds`` for its share."""

    num_groups: int
    rounds: list[Passes]
    round_: Round


def group_of(rounds: Sequence[Passes], round_: Round) -> Group:
    """Visits that are all made equally often, by devices that this divides, are rounds of several groups beside each
    other; any others are one group's."""
    counts = {len(list(same)) for passes in rounds for _, same in groupby(passes)}
    count = counts.pop() if len(counts) == 1 else 1
    if count == 1 or round_.num_devices % count or count > round_.num_microbatches:
        return Group(1, list(rounds), round_)
    return Group(count, [[visit for visit, _ in groupby(passes)] for passes in rounds], round_.of_share(count))


def round_robin(
    passes: Passes,
    *,
    num_devices: int,
    num_microbatches: int,
    first_device: int,
    spilled: frozenset[int] = frozenset(),
) -> Schedule:
    """Visits go to devices in turn, starting at ``first_device``.

    ``spilled``: the layers whose kept input waits on the host and has to be fetched.
    """
    visits: list[Visit] = []
    for stage, ((pass_, layers), same) in enumerate(groupby(passes)):
        for share in shares(num_microbatches, sum(1 for _ in same)):
            visits.append(Visit(pass_, stage, layers, (first_device + len(visits)) % num_devices, share))
    return Schedule(
        visits=tuple(visits),
        actions=tuple(_device_actions([v for v in visits if v.device == d], spilled) for d in range(num_devices)),
        next_device=(first_device + len(visits)) % num_devices,
    )


def _device_actions(visits: list[Visit], spilled: frozenset[int]) -> tuple[Action, ...]:
    """The next stage's upload is issued right after this stage's computes.

    A device works behind the thread that issues, so that upload overlaps these computes; issued earlier it could make
    them wait for the publishing of deeper layers.
    """
    actions: list[Action] = [Action(Op.UPLOAD, visit) for visit in visits[:1]]
    for position, visit in enumerate(visits):
        actions.extend(_computes(visit, spilled))
        actions.extend(Action(Op.UPLOAD, following) for following in visits[position + 1 : position + 2])
        if visit.pass_ is not Pass.FORWARD:
            actions.append(Action(Op.LAND, visit))
        actions.append(Action(Op.RELEASE, visit))
    return tuple(actions)


def _computes(visit: Visit, spilled: frozenset[int]) -> Iterator[Action]:
    """Inputs that wait on the host come back one microbatch ahead, so that the copy overlaps a compute."""
    computes = [Action(Op.COMPUTE, visit, microbatch) for microbatch in visit.microbatches]
    if visit.pass_ is not Pass.BACKWARD or visit.layers.start not in spilled:
        yield from computes
        return
    fetches = [Action(Op.FETCH, visit, microbatch) for microbatch in visit.microbatches]
    yield fetches[0]
    for compute, ahead in zip_longest(computes, fetches[1:]):
        if ahead is not None:
            yield ahead
        yield compute
