"""Cutting a row of numbers into consecutive stages."""

import random
from itertools import combinations, pairwise

import pytest

from roundpipe.plan.partition import even_limits, pack_layers, pack_within, partition_layers


def test_packing_fills_each_stage_up_to_the_limit() -> None:
    assert pack_layers([1, 1, 1, 2, 5, 1], 3) == [range(3), range(3, 4), range(4, 5), range(5, 6)]
    assert pack_layers([], 3) == []


def test_a_stage_that_meets_its_limit_exactly_is_not_cut_for_a_rounding_error() -> None:
    assert pack_layers([0.1] * 30, sum([0.1] * 3)) == [range(i, i + 3) for i in range(0, 30, 3)]


def test_several_limits_hold_at_once_and_may_change_from_stage_to_stage() -> None:
    times, sizes = [0, 1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 9, 10, 11]
    stages = pack_within([(times, 6), (sizes, 4)], 0, 6, ramp=6)
    assert stages == [range(1), range(1, 3), range(3, 4), range(4, 6)]


@pytest.mark.parametrize("seed", range(20))
def test_partition_has_the_smallest_largest_stage(seed: int) -> None:
    """Against every possible cut."""
    draws = random.Random(seed)
    costs = [
        draws.choice([0.0, draws.random(), 3 * draws.random()]) for _ in range(draws.randint(1, 8))
    ]
    count = draws.randint(1, len(costs))

    def largest(bounds: list[int]) -> float:
        return max(sum(costs[a:b]) for a, b in pairwise(bounds))

    cuts = combinations(range(1, len(costs)), count - 1)
    best = min(largest([0, *cut, len(costs)]) for cut in cuts)
    stages = partition_layers(costs, count)
    assert len(stages) <= count
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert max(sum(costs[i] for i in stage) for stage in stages) == pytest.approx(best)


def test_even_limits_give_every_equal_cut_of_equal_layers() -> None:
    totals = list(range(13))
    lengths = {len(pack_within([(totals, limit)], 0, 12)[0]) for limit in even_limits(totals)}
    assert lengths == {1, 2, 3, 4, 6, 12}
