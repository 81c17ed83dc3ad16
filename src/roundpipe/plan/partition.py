"""Cuts a row of layers into stages: within limits (over numbers; bytes or milliseconds, that is the
caller's choice), evenly, and by one layer more or less than another cut."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from .actions import Pass, Passes
from .schedule import forward_passes

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


class Sizes(NamedTuple):
    """A cut as layers per stage, both directions counted from the first layer up (backward: from
    the last stage run).

    ``backward`` begins at the first trained layer: what lies below is never visited backward.
    """

    forward: tuple[int, ...]
    fused: int
    backward: tuple[int, ...]

    def passes(self, num_layers: int, first_trained: int) -> Passes:
        """Its stage runs."""
        return [
            *forward_passes(_ranges(self.forward, 0)),
            (Pass.FUSED, range(num_layers - self.fused, num_layers)),
            *(
                (Pass.BACKWARD, layers)
                for layers in reversed(_ranges(self.backward, first_trained))
            ),
        ]

    def neighbours(self, first_trained: int) -> Iterator["Sizes"]:
        """Cuts that differ by the place of one layer in one direction, or by one fused layer."""
        for forward in _transfers(self.forward):
            yield self._replace(forward=forward)
        for backward in _transfers(self.backward):
            yield self._replace(backward=backward)
        for fused in (self.fused - 1, self.fused + 1):
            below = sum(self.forward) + self.fused - fused
            if fused and below >= 0:
                # The fused stage may reach below what trains; then its layers are in no backward
                # stage.
                change = max(below - first_trained, 0) - sum(self.backward)
                for forward in _resized(self.forward, self.fused - fused):
                    for backward in _resized(self.backward, change):
                        yield Sizes(forward, fused, backward)


def _transfers(stages: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One layer from any stage to any other; an emptied stage goes, and one may come at either
    end."""
    for taken in range(1, len(stages) + 1):
        for given in range(len(stages) + 2):
            if given != taken:
                changed = [0, *stages, 0]
                changed[taken] -= 1
                changed[given] += 1
                yield tuple(filter(None, changed))


def _resized(stages: tuple[int, ...], change: int) -> Iterator[tuple[int, ...]]:
    """``change`` layers more or less, by one at most, in the first stage or in the one next to the
    fused one."""
    if not stages or not change:
        yield (*stages, change) if change else stages
        return
    for stage in sorted({0, len(stages) - 1}):
        yield tuple(filter(None, (*stages[:stage], stages[stage] + change, *stages[stage + 1 :])))


def _ranges(sizes: Sequence[int], start: int) -> list[range]:
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=start))]
