"""Looks for the cut with the shortest predicted round that fits into memory. Pure, and bounded by
work, not by time.

What it exploits, for N devices in round robin and M microbatches, N <= M:

* A round that stands alone (sync) loses what devices wait for their first stage run and after their
  last. Both shrink if the first N forward stages grow one by one and the last N backward stages
  shrink likewise: *ramps*.
* Rounds that overlap (async) lose only imbalance, and M > N leaves slack between stage runs that
  absorbs it, as round robin sends a slow stage to another device each time (if the numbers of
  stages and devices share no factor).
* Every layer in the fused stage saves its recompute, until that stage holds up the others.

So: greedy packing described by six numbers (``_Shape``) on a coarse grid, improved one number at a
time, then layer by layer (hill climbing, as in kernel autotuners: cheap, deterministic, and stopped
at any time it has a valid answer).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from math import inf
from operator import sub
from typing import Any, NamedTuple

from .actions import Pass
from .costs import LayerCosts, StageSums, Workload
from .execute_plan import ModelExecutePlan, plan_of
from .memory import PeakBytes, least_peak, nothing_fits, stage_limits, stage_needs
from .partition import Sizes, cuts_within, even_limits
from .predict import least_period_ms, period_ms, round_ms, stage_runs_in_period

# Stage runs that the searches for one plan may look at, each in about a microsecond: some 40 ms. To
# see what one holds of a device takes as long as to time a few.
MAX_STAGE_RUNS_TIMED = 48_000
_TIMED_PER_PEAK = 3
_GRID, _GRID_TIMED, _DESCENTS, _CLIMBS, _FINALISTS = 6, 30, 3, 3, 8
# A stage run more has to gain this share of a round, because it costs the host something that no
# lane shows.
STAGE_RUN_TAX = 1e-6
# Between the time of the mean stage run and that of the slowest: where overlapping rounds tend to
# end up.
_IMBALANCE_FELT = 0.2


def plan_fused(
    costs: LayerCosts, workload: Workload, max_stage_runs: int = MAX_STAGE_RUNS_TIMED
) -> ModelExecutePlan:
    """The best cut found for a fused round.

    One device and enough memory give one fused stage, in which nothing is recomputed; less memory a
    smaller one.

    Raises:
        PlanError: no cut fits into the limit.
    """
    search = Search(costs, workload, max_stage_runs)
    search.run()
    return search.best


class _Shape(NamedTuple):
    """A cut in six numbers.

    Stages are packed up to ``forward_ms`` and ``backward_ms`` per microbatch, the n-th forward
    stage and the n-th last backward stage up to n / ramp of it, and none over ``stage_bytes`` of
    what it alone needs.
    """

    fused_layers: int
    forward_ms: float
    backward_ms: float
    forward_ramp: int
    backward_ramp: int
    stage_bytes: float


_Ladders = dict[str, Sequence[Any]]


class Search:
    """One search. ``best_ms`` is the best so far, ``stage_runs_timed`` the work done."""

    def __init__(
        self, costs: LayerCosts, workload: Workload, max_stage_runs: int = MAX_STAGE_RUNS_TIMED
    ) -> None:
        self._max_stage_runs = max_stage_runs
        self._round = workload
        self._sums = StageSums(costs)
        self._up = _scaled(self._sums.uploads, costs.up_ms_per_byte / workload.num_microbatches)
        self._down = _scaled(
            self._sums.offloaded, costs.down_ms_per_byte / workload.num_microbatches
        )
        self._needs = stage_needs(costs, workload)
        self._num_layers = costs.num_layers
        self._lowest = min(workload.first_trained, costs.num_layers - 1)
        self._least_stage_runs = min(workload.min_stages, 2 * costs.num_layers - 1 - self._lowest)
        self._is_ample = _most_bytes(costs, workload) <= workload.limit_bytes
        self._packed: dict[tuple[bool, int, float, int, float], tuple[int, ...]] = {}
        self._directions_ms: dict[tuple[bool, tuple[int, ...]], list[float]] = {}
        self._known: dict[Sizes, float] = {}
        self._least_peak: PeakBytes | None = None
        self._best: Sizes | None = None
        self.best_ms = inf
        self.stage_runs_timed = 0

    @property
    def best(self) -> ModelExecutePlan:
        if self._best is None:
            raise nothing_fits(self._sums.costs, self._round, self._least_peak)
        return plan_of(self._best.passes(self._num_layers, self._lowest))

    def run(self) -> None:
        """Three widths of look: a coarse grid, from its best one number at a time, from the best of
        all by layer."""
        ladders = self._ladders()
        for shape in self._grid(ladders):
            self._descend(shape, ladders)
        for sizes in sorted(self._known, key=self._known.__getitem__)[:_CLIMBS]:
            self._climb(sizes)
        if self._round.overlaps:
            self._settle()

    def _settle(self) -> None:
        """Times the best again, now for long enough."""
        finalists = sorted(self._known, key=self._known.__getitem__)[:_FINALISTS]
        settled = {
            sizes: period_ms(self._stage_runs_ms(sizes), len(sizes.forward), self._round)
            for sizes in finalists
            if self._known[sizes] < inf
        }
        if settled:
            self._best = min(settled, key=settled.__getitem__)
            self.best_ms = settled[self._best]

    # By shape.

    def _ladders(self) -> _Ladders:
        """The values to try for each number of a shape."""
        devices, shares = self._round.num_devices, stage_limits(self._round)
        ramps = sorted({0, devices // 2, devices}) if devices > 1 else [0]
        return {
            "fused_layers": self._fused_ladder(shares),
            "forward_ms": even_limits(self._sums.forward),
            "backward_ms": even_limits(self._sums.again),
            "forward_ramp": ramps,
            "backward_ramp": ramps,
            "stage_bytes": shares,
        }

    def _fused_ladder(self, shares: Sequence[float]) -> list[int]:
        """From one layer to the most that fit: that alone on one device, else no more than a
        device's share of work."""
        low, high = 1, self._num_layers
        while low < high:
            middle = (low + high + 1) // 2
            if any(
                self._fits(self._sizes(_Shape(middle, inf, inf, 0, 0, share))) for share in shares
            ):
                low = middle
            else:
                high = middle - 1
        if self._round.num_devices == 1:
            return [low]
        share = (self._sums.forward[-1] + self._sums.again[-1]) / self._round.num_devices
        fused = self._sums.fused
        return [n for n in range(1, low + 1) if n == 1 or fused[-1] - fused[-1 - n] <= share]

    def _grid(self, ladders: _Ladders) -> list[_Shape]:
        """The best of a coarse grid, under the loosest limit on stages with which anything fits."""
        axes = [
            _thinned(ladders[name], _GRID) for name in ("fused_layers", "forward_ms", "backward_ms")
        ]
        ramps = (
            [0]
            if self._round.overlaps
            else ladders["forward_ramp"][:: len(ladders["forward_ramp"]) - 1 or 1]
        )
        timed: dict[_Shape, float] = {}
        for share in ladders["stage_bytes"]:
            cuts: dict[Sizes, _Shape] = {}
            for ramp, (fused, ahead, back) in product(ramps, product(*axes)):
                shape = _Shape(fused, ahead, back, ramp, ramp, share)
                cuts.setdefault(self._sizes(shape), shape)
            for tried, sizes in enumerate(sorted(cuts, key=self._promise)):
                if self._round.overlaps and tried >= _GRID_TIMED and self._best is not None:
                    break
                timed[cuts[sizes]] = self._try(sizes, inf)
            if self._best is not None:
                break
        else:
            shape = _Shape(1, 0.0, 0.0, 0, 0, inf)  # one layer in every stage, the last resort
            timed[shape] = self._try(self._sizes(shape), inf)
        return sorted(timed, key=timed.__getitem__)[:_DESCENTS]

    def _descend(self, shape: _Shape, ladders: _Ladders) -> None:
        """One number at a time to its best value, until none gets better."""
        reached = self._try(self._sizes(shape), inf)
        improved = reached < inf
        while improved:
            improved = False
            for name, values in ladders.items():
                for other in [shape._replace(**{name: value}) for value in values]:
                    ms = self._try(self._sizes(other), reached)
                    if ms < reached:
                        shape, reached, improved = other, ms, True

    def _sizes(self, shape: _Shape) -> Sizes:
        fused_start = self._num_layers - shape.fused_layers
        _, forward_ms, backward_ms, ramp_up, ramp_down, share = shape
        forward = self._pack(True, fused_start, forward_ms, ramp_up, share)
        backward = self._pack(False, fused_start, backward_ms, ramp_down, share)
        return Sizes(forward, shape.fused_layers, backward)

    def _pack(
        self, is_forward: bool, stop: int, limit: float, ramp: int, share: float
    ) -> tuple[int, ...]:
        key = is_forward, stop, limit, ramp, share
        packed = self._packed.get(key)
        if packed is None:
            start, times = (
                (0, self._sums.forward) if is_forward else (self._lowest, self._sums.again)
            )
            needs = self._needs[Pass.FORWARD if is_forward else Pass.BACKWARD]
            cuts = cuts_within([(times, limit), (needs, share)], start, stop, ramp=ramp)
            packed = self._packed[key] = tuple(map(sub, cuts[1:], cuts))
        return packed

    # By layer.

    def _climb(self, sizes: Sizes) -> None:
        """Moves one layer from any stage to any other, as long as that makes a better cut."""
        improved: Sizes | None = sizes
        while improved is not None:
            sizes, reached, improved = improved, self._known[improved], None
            for moved in sizes.neighbours(self._lowest):
                if self.stage_runs_timed > self._max_stage_runs:
                    return
                if self._try(moved, reached) < reached:
                    improved = moved
                    break

    # What a cut costs.

    def _try(self, sizes: Sizes, bar: float) -> float:
        """The cut's time if that is below ``bar``; infinite if it does not fit or has too few stage
        runs."""
        if sizes not in self._known:
            if self.stage_runs_timed > self._max_stage_runs and self._best is not None:
                return inf
            ms = self._time(sizes, bar)
            if ms is None:
                return inf
            self._known[sizes] = ms
            if ms < self.best_ms:
                self._best, self.best_ms = sizes, ms
        return self._known[sizes]

    def _time(self, sizes: Sizes, bar: float) -> float | None:
        """None: provably not below ``bar``."""
        stage_runs_ms = self._stage_runs_ms(sizes)
        self.stage_runs_timed += len(stage_runs_ms)
        if len(stage_runs_ms) < self._least_stage_runs or (bar == inf and not self._fits(sizes)):
            return inf
        tax = 1 + STAGE_RUN_TAX * len(stage_runs_ms)
        if least_period_ms(stage_runs_ms, self._round) * tax >= bar:
            return None
        if self._round.overlaps:
            self.stage_runs_timed += stage_runs_in_period(len(stage_runs_ms), self._round)
            ms = period_ms(stage_runs_ms, len(sizes.forward), self._round, settled=False) * tax
        else:
            ms = round_ms(stage_runs_ms, self._round) * tax
        if ms >= bar:
            return None
        return ms if bar == inf or self._fits(sizes) else inf

    def _promise(self, sizes: Sizes) -> float:
        stage_runs_ms = self._stage_runs_ms(sizes)
        self.stage_runs_timed += len(stage_runs_ms)
        least = least_period_ms(stage_runs_ms, self._round)
        most = (
            max(stage_runs_ms)
            * len(stage_runs_ms)
            * self._round.num_microbatches
            / self._round.num_devices
        )
        return least + _IMBALANCE_FELT * (most - least)

    def _stage_runs_ms(self, sizes: Sizes) -> list[float]:
        """``StageSums.stage_run_ms`` of every stage run, without making the stage runs."""
        fused = [(self._num_layers - sizes.fused, self._num_layers)]
        return [
            *self._direction_ms(True, sizes.forward),
            *_slowest(fused, self._sums.fused, self._up, self._down),
            *self._direction_ms(False, sizes.backward),
        ]

    def _direction_ms(self, is_forward: bool, sizes: tuple[int, ...]) -> list[float]:
        """Of its stage runs, in their order. Kept, because most cuts differ from one seen before in
        one direction only."""
        key = is_forward, sizes
        stage_runs_ms = self._directions_ms.get(key)
        if stage_runs_ms is None:
            stages = list(pairwise(accumulate(sizes, initial=0 if is_forward else self._lowest)))
            if is_forward:
                stage_runs_ms = _slowest(stages, self._sums.forward, self._up)
            else:
                stage_runs_ms = _slowest(stages[::-1], self._sums.again, self._up, self._down)
            self._directions_ms[key] = stage_runs_ms
        return stage_runs_ms

    def _fits(self, sizes: Sizes) -> bool:
        if self._is_ample:
            return True
        passes = sizes.passes(self._num_layers, self._lowest)
        self.stage_runs_timed += _TIMED_PER_PEAK * len(passes)
        peak = least_peak(passes, self._sums, self._round)
        if self._least_peak is None or peak.total < self._least_peak.total:
            self._least_peak = peak
        return peak.total <= self._round.limit_bytes


def _scaled(totals: Sequence[float], factor: float) -> Sequence[float]:
    """Empty if everything is nothing."""
    return [total * factor for total in totals] if factor else []


def _slowest(stages: Sequence[tuple[int, int]], *kinds: Sequence[float]) -> list[float]:
    """By stage the largest of several sums; ``kinds`` are running sums, empty ones left out."""
    first, *others = kinds
    slowest = [first[b] - first[a] for a, b in stages]
    for sums in filter(None, others):
        slowest = [max(ms, sums[b] - sums[a]) for ms, (a, b) in zip(slowest, stages, strict=True)]
    return slowest


def _most_bytes(costs: LayerCosts, workload: Workload) -> float:
    """More than any plan can need, so that ample memory costs the search nothing."""
    stages = (
        2 * sum(costs.weight_bytes)
        + sum(costs.saved_bytes)
        + 2 * sum(costs.passing_bytes + costs.gradient_bytes)
    )
    return stages + (1 + 3 * workload.num_microbatches) * sum(costs.input_bytes)


def _thinned(values: Sequence[Any], count: int) -> Sequence[Any]:
    """At most ``count`` of the values, evenly, the first among them."""
    return values[:: -(-len(values) // count)]
