"""How long a round takes, predicted in a few microseconds so that a search can afford it.

[Note: first and last] Stage run k runs its microbatches in a row, each in the same time, on the
device that stage run k - N leaves. Let ``first`` and ``last`` be the ends of its first and last
microbatch::

    first[k] = max(last[k - N], first[k - 1]) + ms[k]
    last[k]  = max(first[k] + (M - 1) * ms[k], last[k - 1] + ms[k])

That is exact: the ends of stage run k - 1 are convex in the microbatch (by induction a maximum of
straight lines), so only its two outermost microbatches can hold stage run k up. A simulation of
every action agrees (tests/plan/test_simulate.py).
"""

from collections.abc import Sequence
from math import gcd

from .actions import Pass, Passes
from .costs import StageSums, Workload

# Stage runs to each device until rounds are near their rhythm, and rotations until they are in it.
_NEAR, _SETTLED = 3, 4


class _Pipeline:
    """Devices in round robin, and when each is free."""

    def __init__(self, num_devices: int) -> None:
        self.free = [0.0] * num_devices
        self.position = 0

    def run(
        self, stage_runs_ms: Sequence[float], last_microbatch: int, start: float, announced: int
    ) -> tuple[float, float]:
        """One round; when the stage run ``announced`` and when all is done."""
        free, position = self.free, self.position
        first = last = known = start
        for stage_run, ms in enumerate(stage_runs_ms):
            ready = free[position]
            first = (ready if ready > first else first) + ms
            last = max(first + last_microbatch * ms, last + ms)
            free[position] = last
            position = position + 1 if position + 1 < len(free) else 0
            if stage_run == announced:
                known = last
        self.position = position
        return known, max(free)


def predicted_ms(passes: Passes, stages: StageSums, workload: Workload) -> float:
    """Time from round to round."""
    stage_runs_ms = [
        stages.stage_run_ms(*stage_run, workload.num_microbatches) for stage_run in passes
    ]
    if not workload.overlaps:
        return round_ms(stage_runs_ms, workload)
    announced = next(
        (i for i, (pass_, _) in enumerate(passes) if pass_ is not Pass.FORWARD), len(passes) - 1
    )
    return period_ms(stage_runs_ms, announced, workload)


def round_ms(stage_runs_ms: Sequence[float], workload: Workload) -> float:
    """A round by itself, from its first forward to its last backward."""
    return _Pipeline(workload.num_devices).run(
        stage_runs_ms, workload.num_microbatches - 1, 0.0, -1
    )[1]


def period_ms(
    stage_runs_ms: Sequence[float], announced: int, workload: Workload, *, settled: bool = True
) -> float:
    """Time from round to round where each begins as soon as the last one's losses are known.

    Args:
        announced: the stage run that makes the losses.
        settled: False times early rounds, a few percent off in rare cases, at a fraction of the
            work.
    """
    warm_up, timed = _rounds(len(stage_runs_ms), workload.num_devices)
    warm_up = _SETTLED * timed if settled else warm_up
    pipeline = _Pipeline(workload.num_devices)
    start, ends = 0.0, []
    for _ in range(warm_up + timed):
        start, end = pipeline.run(stage_runs_ms, workload.num_microbatches - 1, start, announced)
        ends.append(end)
    return (ends[-1] - ends[-1 - timed]) / timed


def stage_runs_in_period(num_stage_runs: int, workload: Workload) -> int:
    """How many stage runs ``period_ms(settled=False)`` runs through."""
    return sum(_rounds(num_stage_runs, workload.num_devices)) * num_stage_runs


def _rounds(num_stage_runs: int, num_devices: int) -> tuple[int, int]:
    """Rounds to come near the rhythm, and rounds after which round robin is back where it began."""
    return -(-_NEAR * num_devices // num_stage_runs), num_devices // gcd(
        num_stage_runs, num_devices
    )


def least_period_ms(stage_runs_ms: Sequence[float], workload: Workload) -> float:
    """No rhythm is faster than the busiest device: round robin gives it every gcd(S, N)-th stage
    run."""
    shared = gcd(len(stage_runs_ms), workload.num_devices)
    busiest = max(sum(stage_runs_ms[start::shared]) for start in range(shared))
    return busiest * workload.num_microbatches * shared / workload.num_devices
