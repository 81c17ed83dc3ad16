"""How long a round takes, predicted in a few microseconds so that a search can afford it.

[Note: first and last] Visit k runs its microbatches in a row, each in the same time, on the device that visit k - N
leaves. Let ``first`` and ``last`` be the ends of its first and last microbatch::

    first[k] = max(last[k - N], first[k - 1]) + ms[k]
    last[k]  = max(first[k] + (M - 1) * ms[k], last[k - 1] + ms[k])

That is exact: the ends of visit k - 1 are convex in the microbatch (by induction a maximum of straight lines), so only
its two outermost microbatches can hold visit k up. simulate.py runs every action and agrees (tests/timeline).
"""

from collections.abc import Sequence
from math import gcd

from .actions import Pass, Passes
from .costs import Round, StageSums

# Visits to each device until rounds are near their rhythm, and rotations until they are in it.
_NEAR, _SETTLED = 3, 4


class _Pipeline:
    """Devices in round robin, and when each is free."""

    def __init__(self, num_devices: int) -> None:
        self.free = [0.0] * num_devices
        self.position = 0

    def run(
        self, visits_ms: Sequence[float], last_microbatch: int, start: float, announced: int
    ) -> tuple[float, float]:
        """One round; when the visit ``announced`` and when all is done."""
        free, position = self.free, self.position
        first = last = known = start
        for visit, ms in enumerate(visits_ms):
            ready = free[position]
            first = (ready if ready > first else first) + ms
            last = max(first + last_microbatch * ms, last + ms)
            free[position] = last
            position = position + 1 if position + 1 < len(free) else 0
            if visit == announced:
                known = last
        self.position = position
        return known, max(free)


def predicted_ms(passes: Passes, stages: StageSums, round_: Round) -> float:
    """Time from round to round."""
    visits_ms = [stages.visit_ms(*visit, round_.num_microbatches) for visit in passes]
    if not round_.overlaps:
        return round_ms(visits_ms, round_)
    announced = next((i for i, (pass_, _) in enumerate(passes) if pass_ is not Pass.FORWARD), len(passes) - 1)
    return period_ms(visits_ms, announced, round_)


def round_ms(visits_ms: Sequence[float], round_: Round) -> float:
    """A round by itself, from its first forward to its last backward."""
    return _Pipeline(round_.num_devices).run(visits_ms, round_.num_microbatches - 1, 0.0, -1)[1]


def period_ms(visits_ms: Sequence[float], announced: int, round_: Round, *, settled: bool = True) -> float:
    """Time from round to round where each begins as soon as the last one's losses are known.

    Args:
        announced: the visit that makes the losses.
        settled: False times early rounds, a few percent off in rare cases, at a fraction of the work.
    """
    warm_up, timed = _rounds(len(visits_ms), round_.num_devices)
    warm_up = _SETTLED * timed if settled else warm_up
    pipeline = _Pipeline(round_.num_devices)
    start, ends = 0.0, []
    for _ in range(warm_up + timed):
        start, end = pipeline.run(visits_ms, round_.num_microbatches - 1, start, announced)
        ends.append(end)
    return (ends[-1] - ends[-1 - timed]) / timed


def visits_in_period(num_visits: int, round_: Round) -> int:
    """How many visits ``period_ms(settled=False)`` runs through."""
    return sum(_rounds(num_visits, round_.num_devices)) * num_visits


def _rounds(num_visits: int, num_devices: int) -> tuple[int, int]:
    """Rounds to come near the rhythm, and rounds after which round robin is back where it began."""
    return -(-_NEAR * num_devices // num_visits), num_devices // gcd(num_visits, num_devices)


def least_period_ms(visits_ms: Sequence[float], round_: Round) -> float:
    """No rhythm is faster than the busiest device: round robin gives it every gcd(S, N)-th visit."""
    shared = gcd(len(visits_ms), round_.num_devices)
    busiest = max(sum(visits_ms[start::shared]) for start in range(shared))
    return busiest * round_.num_microbatches * shared / round_.num_devices
