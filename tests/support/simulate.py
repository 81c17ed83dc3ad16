"""Runs schedules on devices with a fake clock: what would happen, action by action, if costs were
exact.

The oracle of `plan/predict.py`, slower and knowing more: every microbatch, copies up and down on
lanes of their own. Boundary transfers are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

from roundpipe.errors import InternalError
from roundpipe.plan.actions import Action, Op, Pass, Passes, StageRun
from roundpipe.plan.costs import LayerCosts, StageSums, Workload
from roundpipe.plan.schedule import Schedule, round_robin

# Rotations of the round-robin position until overlapping rounds follow each other in their rhythm.
_WARM_UP = 4


class Span(NamedTuple):
    """One action of one call, in time."""

    action: Action
    call: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What each device did and when."""

    spans: tuple[Span, ...]
    num_devices: int

    @property
    def makespan_ms(self) -> float:
        return max(span.end_ms for span in self.spans)

    def end_ms(self, call: int) -> float:
        return max(span.end_ms for span in self.spans if span.call == call)

    def computes(self, device: int) -> list[Span]:
        """The device's computes in order."""
        return [
            s
            for s in self.spans
            if s.action.op is Op.COMPUTE and s.action.stage_run.device == device
        ]

    def busy_ms(self, device: int) -> float:
        return sum(span.end_ms - span.start_ms for span in self.computes(device))

    @property
    def bubble(self) -> float:
        """The share of all devices' time that went by without compute."""
        busy = sum(map(self.busy_ms, range(self.num_devices)))
        return 1 - busy / (self.num_devices * self.makespan_ms)

    def draw(self, step_ms: float = 1.0) -> str:
        """A row for each device, a column for each step; an action is written where it starts."""
        width = max(len(_label(span)) for span in self.spans) + 1
        rows = []
        for device in range(self.num_devices):
            cells = [""] * round(self.makespan_ms / step_ms)
            for span in self.computes(device):
                begin, end = round(span.start_ms / step_ms), round(span.end_ms / step_ms)
                cells[begin:end] = [
                    _label(span),
                    *("-" * (width - 1) for _ in range(end - begin - 1)),
                ]
            rows.append(f"{device}: " + "".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(rows)


class Steady(NamedTuple):
    """Rounds that follow each other: time from round to round, and the share of it that devices
    wait."""

    round_ms: float
    bubble: float


def steady_state(passes: Passes, costs: LayerCosts, workload: Workload) -> Steady:
    """Rounds in a row: each alone, or overlapping and timed over whole rotations once they have
    found their rhythm."""
    rotation = (
        workload.num_devices // gcd(len(passes), workload.num_devices) if workload.overlaps else 1
    )
    schedules = rounds_in_a_row(
        passes, workload, (_WARM_UP + 1) * rotation if workload.overlaps else 2
    )
    timeline = simulate(schedules, costs, overlaps=workload.overlaps)
    last = len(schedules) - 1
    ms = (timeline.end_ms(last) - timeline.end_ms(last - rotation)) / rotation
    totals = StageSums(costs)
    compute = workload.num_microbatches * sum(totals.compute_ms(*stage_run) for stage_run in passes)
    return Steady(ms, 1 - compute / (workload.num_devices * ms))


def rounds_in_a_row(passes: Passes, workload: Workload, count: int) -> list[Schedule]:
    """The same stage runs again and again, round robin carrying on."""
    schedules: list[Schedule] = []
    for _ in range(count):
        schedules.append(
            round_robin(
                passes,
                num_devices=workload.num_devices,
                num_microbatches=workload.num_microbatches,
                first_device=schedules[-1].next_device if schedules else 0,
            )
        )
    return schedules


def simulate(schedules: Sequence[Schedule], costs: LayerCosts, *, overlaps: bool) -> Timeline:
    """Runs one call after another.

    ``overlaps``: a call begins once the losses of the one before are known, as ``forward_backward``
    and an async ``step`` return then; else once the one before is done (a sync step, whose
    optimizer takes no time here).
    """
    num_devices = len(schedules[0].actions)
    devices = [_Device(schedules, device) for device in range(num_devices)]
    clock = _Clock(StageSums(costs), schedules, overlaps)
    while sum(device.advance(clock) for device in devices):
        pass
    stuck = [device.queue[device.position] for device in devices if not device.is_done]
    if stuck:
        raise InternalError(f"the schedule waits for itself: {stuck}")
    return Timeline(spans=tuple(clock.spans), num_devices=num_devices)


class _Clock:
    """What has happened so far, on all devices."""

    def __init__(self, stages: StageSums, schedules: Sequence[Schedule], overlaps: bool) -> None:
        self.stages = stages
        self.spans: list[Span] = []
        self._overlaps = overlaps
        self._posted: dict[tuple[str, int, int, int], float] = {}
        self._gates = [0.0] * len(schedules)
        self._left = [sum(map(len, schedule.actions)) for schedule in schedules]
        self._losses_left = [_num_losses(schedule) for schedule in schedules]

    def begin_ms(self, call: int) -> float | None:
        """When the call is submitted; None while that is not known."""
        if call == 0:
            return 0.0
        left = self._losses_left if self._overlaps else self._left
        return None if left[call - 1] else self._gates[call - 1]

    def inputs_ms(self, call: int, action: Action) -> float | None:
        """When everything the compute needs from other stage runs is there; None while that is not
        known."""
        layers, microbatch = action.stage_run.layers, action.microbatch
        if action.stage_run.pass_ is not Pass.BACKWARD:
            needs = [("x", call, layers.start, microbatch)] if layers.start else []
        else:
            needs = [
                ("g", call, layers.stop, microbatch),
                ("saved", call, layers.start, microbatch),
            ]
        times = [self._posted.get(key) for key in needs]
        return None if None in times else max([0.0, *(time for time in times if time is not None)])

    def saved_ms(self, call: int, action: Action) -> float | None:
        """When the input that a recompute starts from was made; None while that is not known."""
        return self._posted.get(("saved", call, action.stage_run.layers.start, action.microbatch))

    def done(self, call: int, action: Action, start: float, end: float) -> None:
        self.spans.append(Span(action, call, start, end))
        self._left[call] -= 1
        is_loss = _makes_loss(action)
        if is_loss:
            self._losses_left[call] -= 1
        if is_loss or not self._overlaps:
            self._gates[call] = max(self._gates[call], end)
        if action.op is Op.COMPUTE:
            self._post(call, action, end)

    def _post(self, call: int, action: Action, end: float) -> None:
        layers, microbatch = action.stage_run.layers, action.microbatch
        if action.stage_run.pass_ is Pass.FORWARD:
            self._posted["x", call, layers.stop, microbatch] = end
            self._posted.update({("saved", call, layer, microbatch): end for layer in layers})
        else:
            self._posted["g", call, layers.start, microbatch] = end


@dataclass
class _Device:
    """One device's queue and when its lanes are free."""

    schedules: Sequence[Schedule]
    index: int
    queue: list[tuple[int, Action]] = field(init=False)
    position: int = 0
    up_ms: float = 0.0
    compute_ms: float = 0.0
    down_ms: float = 0.0
    slot_free_ms: float = 0.0
    uploaded_ms: dict[tuple[int, StageRun], float] = field(default_factory=dict)
    fetched_ms: dict[tuple[int, int, int], float] = field(
        default_factory=dict
    )  # by call, layer, microbatch

    def __post_init__(self) -> None:
        self.queue = [
            (n, action)
            for n, schedule in enumerate(self.schedules)
            for action in schedule.actions[self.index]
        ]

    @property
    def is_done(self) -> bool:
        return self.position == len(self.queue)

    def advance(self, clock: _Clock) -> int:
        """Does what can be done by now; how many actions that was."""
        before = self.position
        while not self.is_done and self._do(clock, *self.queue[self.position]):
            self.position += 1
        return self.position - before

    def _do(self, clock: _Clock, call: int, action: Action) -> bool:
        stage_run, costs = action.stage_run, clock.stages.costs
        begin = clock.begin_ms(call)
        if begin is None:
            return False
        if action.op is Op.UPLOAD:
            start = max(begin, self.up_ms, self.slot_free_ms)
            moved = sum(costs.upload_bytes[layer] for layer in stage_run.layers)
            self.up_ms = end = start + moved * costs.up_ms_per_byte
            self.uploaded_ms[call, stage_run] = end
        elif action.op is Op.FETCH:
            saved = clock.saved_ms(call, action)
            if saved is None:
                return False
            start = max(begin, self.up_ms, saved)
            self.up_ms = end = (
                start + costs.input_bytes[stage_run.layers.start] * costs.up_ms_per_byte
            )
            self.fetched_ms[call, stage_run.layers.start, action.microbatch] = end
        elif action.op is Op.COMPUTE:
            arrived = clock.inputs_ms(call, action)
            if arrived is None:
                return False
            fetched = self.fetched_ms.get((call, stage_run.layers.start, action.microbatch), 0.0)
            start = max(begin, self.compute_ms, arrived, fetched, self.uploaded_ms[call, stage_run])
            self.compute_ms = end = start + clock.stages.compute_ms(
                stage_run.pass_, stage_run.layers
            )
        elif action.op is Op.OFFLOAD:
            start = max(self.compute_ms, self.down_ms)
            moved = sum(costs.offloaded_bytes[layer] for layer in stage_run.layers)
            self.down_ms = end = start + moved * costs.down_ms_per_byte
        else:
            start = end = self.slot_free_ms = self.compute_ms
        clock.done(call, action, start, end)
        return True


def _makes_loss(action: Action) -> bool:
    return action.op is Op.COMPUTE and action.stage_run.pass_ is Pass.FUSED


def _num_losses(schedule: Schedule) -> int:
    return sum(_makes_loss(action) for actions in schedule.actions for action in actions)


def _label(span: Span) -> str:
    return repr(span.action).split("@")[0]
