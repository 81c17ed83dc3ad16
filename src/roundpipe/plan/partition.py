"""Cuts a row of layers into stages. Pure functions over numbers; bytes or milliseconds, that is the
caller's choice."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

# How far float sums may miss a limit that they should meet exactly.
_ROUNDING = 1e-9


def pack_layers(costs: Sequence[float], limit: float) -> list[range]:
    """Fewest consecutive stages whose cost stays within ``limit``; a single layer above it gets a
    stage of its own."""
    return pack_within([([0.0, *accumulate(costs)], limit)], 0, len(costs))


def pack_within(
    limits: Sequence[tuple[Sequence[float], float]], start: int, end: int, *, ramp: int = 0
) -> list[range]:
    """Stages over layers ``start`` to ``end``, packed greedily under several limits at once.

    Args:
        limits: pairs of running sums (``sums[j] - sums[i]`` is the cost of layers i to j) and the
            limit of a stage. A single layer above a limit gets a stage of its own.
        ramp: the n-th stage gets only n / ``ramp`` of the first limit.
    """
    return [range(a, b) for a, b in pairwise(cuts_within(limits, start, end, ramp=ramp))]


def cuts_within(
    limits: Sequence[tuple[Sequence[float], float]], start: int, end: int, *, ramp: int = 0
) -> list[int]:
    """Where the stages of ``pack_within`` begin, and where the last one ends."""
    (sums, limit), *others = limits
    fixed = [(own, most * (1 + _ROUNDING)) for own, most in others if most < inf]
    cuts = [start]
    while start < end:
        stop = end
        if limit < inf:
            allowed = limit * min(1.0, len(cuts) / ramp) if ramp else limit
            stop = (
                bisect_right(sums, sums[start] + allowed * (1 + _ROUNDING), start + 1, end + 1) - 1
            )
        for own, most in fixed:
            stop = bisect_right(own, own[start] + most, start + 1, stop + 1) - 1
        start = max(stop, start + 1)
        cuts.append(start)
    return cuts


def partition_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """At most ``num_stages`` consecutive stages with the smallest possible largest cost.

    The largest cost of an optimal cut is the sum of some run of layers, so those sums are the only
    limits to try.
    """
    sums = [0.0, *accumulate(costs)]
    limits = sorted(
        {sums[j] - sums[i] for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)}
    )
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, limits[middle], num_stages):
            high = middle
        else:
            low = middle + 1
    return pack_layers(costs, limits[low]) if limits else []


def _fits(costs: Sequence[float], limit: float, num_stages: int) -> bool:
    return max(costs) <= limit * (1 + _ROUNDING) and len(pack_layers(costs, limit)) <= num_stages


def even_limits(totals: Sequence[float]) -> list[float]:
    """Limits that give n equal stages, for every n that matters: about 2 * sqrt(layers) of them."""
    num_layers = len(totals) - 1
    lengths = {num_layers // stages for stages in range(1, num_layers + 1)}
    return sorted(totals[-1] * length / num_layers for length in lengths)
