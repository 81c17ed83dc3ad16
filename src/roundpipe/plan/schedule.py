"""Turns stages into what each device does, in order. Pure: the same arguments give the same drawing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .actions import Action, Op, Pass, Visit
from .actions import Passes as Passes

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
    fused, *rest = plan.bwd_plan
    return [*forward_passes(plan.fwd_plan), (Pass.FUSED, fused), *backward_passes(rest, first_trained)]


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


def round_robin(passes: Passes, *, num_devices: int, num_microbatches: int, first_device: int) -> Schedule:
    """Visits go to devices in turn, starting at ``first_device``."""
    visits = tuple(
        Visit(pass_, index, layers, (first_device + index) % num_devices, range(num_microbatches))
        for index, (pass_, layers) in enumerate(passes)
    )
    return Schedule(
        visits=visits,
        actions=tuple(_device_actions([v for v in visits if v.device == d]) for d in range(num_devices)),
        next_device=(first_device + len(visits)) % num_devices,
    )


def _device_actions(visits: list[Visit]) -> tuple[Action, ...]:
    """The next stage's upload is issued right after this stage's computes.

    A device works behind the thread that issues, so that upload overlaps these computes; issued earlier it could make
    them wait for the publishing of deeper layers.
    """
    actions: list[Action] = [Action(Op.UPLOAD, visit) for visit in visits[:1]]
    for position, visit in enumerate(visits):
        actions.extend(Action(Op.COMPUTE, visit, microbatch) for microbatch in visit.microbatches)
        actions.extend(Action(Op.UPLOAD, following) for following in visits[position + 1 : position + 2])
        if visit.pass_ is not Pass.FORWARD:
            actions.append(Action(Op.LAND, visit))
        actions.append(Action(Op.RELEASE, visit))
    return tuple(actions)
