"""Schedules on devices with a fake clock: the pictures they promise, and how much of the time
devices wait."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest

from roundpipe import ModelExecutePlan
from roundpipe.errors import InternalError
from roundpipe.plan.best import step_ms
from roundpipe.plan.costs import LayerCosts, StageSums, Workload
from roundpipe.plan.partition import Sizes
from roundpipe.plan.predict import predicted_ms
from roundpipe.plan.schedule import Schedule, fused_passes, round_robin
from roundpipe.plan.search import plan_fused
from tests.support.simulate import Timeline, rounds_in_a_row, simulate, steady_state

PLAN = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 6), range(2, 4), range(2)]
)
# A forward stage run takes 2 ms for each microbatch, a fused or backward stage run 4.
COSTS = LayerCosts(forward=(1.0,) * 6, backward=(1.0,) * 6)


def two_calls(num_devices: int, *, overlaps: bool, costs: LayerCosts = COSTS) -> Timeline:
    workload = Workload(num_devices=num_devices, num_microbatches=2)
    return simulate(rounds_in_a_row(fused_passes(PLAN, 0), workload, 2), costs, overlaps=overlaps)


# Two calls. A column is 2 ms. Async: the second call begins once X2.1, the last loss of the first,
# is known.
TIMELINES = {
    (1, "sync"): """
0: F0.0 F0.1 F1.0 F1.1 X2.0 ---- X2.1 ---- B3.0 ---- B3.1 ---- B4.0 ---- B4.1 ---- F0.0 F0.1 \
F1.0 F1.1 X2.0 ---- X2.1 ---- B3.0 ---- B3.1 ---- B4.0 ---- B4.1 ----
""",
    (2, "sync"): """
0: F0.0 F0.1 X2.0 ---- X2.1 ---- B4.0 ---- B4.1 ----      F1.0 F1.1      B3.0 ---- B3.1 ----
1:      F1.0 F1.1      B3.0 ---- B3.1 ----           F0.0 F0.1 X2.0 ---- X2.1 ---- B4.0 ---- \
B4.1 ----
""",
    (2, "async"): """
0: F0.0 F0.1 X2.0 ---- X2.1 ---- B4.0 ---- B4.1 ---- F1.0 F1.1      B3.0 ---- B3.1 ----
1:      F1.0 F1.1      B3.0 ---- B3.1 ---- F0.0 F0.1      X2.0 ---- X2.1 ---- B4.0 ---- B4.1 ----
""",
    (3, "sync"): """
0: F0.0 F0.1           B3.0 ---- B3.1 ----                F1.0 F1.1                B4.0 ---- \
B4.1 ----
1:      F1.0 F1.1                B4.0 ---- B4.1 ----           X2.0 ---- X2.1 ----
2:           X2.0 ---- X2.1 ----                     F0.0 F0.1           B3.0 ---- B3.1 ----
""",
    (3, "async"): """
0: F0.0 F0.1           B3.0 ---- B3.1 ---- F1.0 F1.1                     B4.0 ---- B4.1 ----
1:      F1.0 F1.1                B4.0 ---- B4.1 ---- X2.0 ---- X2.1 ----
2:           X2.0 ---- X2.1 ---- F0.0 F0.1                     B3.0 ---- B3.1 ----
""",
    (8, "async"): """
0: F0.0 F0.1                                         B3.0 ---- B3.1 ----
1:      F1.0 F1.1                                              B4.0 ---- B4.1 ----
2:           X2.0 ---- X2.1 ----
3:                     B3.0 ---- B3.1 ----
4:                               B4.0 ---- B4.1 ----
5:                               F0.0 F0.1
6:                                    F1.0 F1.1
7:                                         X2.0 ---- X2.1 ----
""",
}


@pytest.mark.parametrize(("num_devices", "mode"), TIMELINES, ids=str)
def test_timeline(num_devices: int, mode: str) -> None:
    drawn = two_calls(num_devices, overlaps=mode == "async").draw(step_ms=2)
    assert drawn == TIMELINES[num_devices, mode].strip("\n")


def test_figures_of_a_timeline() -> None:
    timeline = two_calls(2, overlaps=True)
    assert timeline.makespan_ms == timeline.end_ms(1) == 38
    assert [timeline.busy_ms(device) for device in range(2)] == [32, 32]
    assert timeline.bubble == pytest.approx(1 - 64 / 76)


def test_a_compute_waits_for_its_upload_and_an_upload_for_a_slot() -> None:
    """1 ms for each layer's weights. Two stages fit: the third goes up when the first is released,
    at 6 ms."""
    costs = LayerCosts(
        forward=(1.0,) * 6,
        backward=(1.0,) * 6,
        weight_bytes=(1000,) * 6,
        gradient_bytes=(2000,) * 6,
        up_ms_per_byte=0.001,
        down_ms_per_byte=0.001,
    )
    spans = [span for span in two_calls(1, overlaps=True, costs=costs).spans if span.call == 0]
    times = {repr(span.action): (span.start_ms, span.end_ms) for span in spans}
    assert times["UF0@0"] == (0, 2)
    assert times["F0.0@0"] == (2, 4)
    assert times["UF1@0"] == (2, 4)
    assert times["UX2@0"] == (6, 8)
    assert times["X2.0@0"] == (10, 14)
    assert times["LX2@0"] == (18, 22)


def test_a_schedule_that_waits_for_itself_is_reported() -> None:
    (whole,) = rounds_in_a_row(
        fused_passes(PLAN, 0), Workload(num_devices=1, num_microbatches=2), 1
    )
    computes = [action for action in whole.actions[0] if action.stage_run.pass_.value != "F"]
    broken = Schedule(stage_runs=whole.stage_runs, actions=(tuple(computes),), next_device=0)
    with pytest.raises(InternalError, match=r"waits for itself.*X2\.0@0"):
        simulate([broken], COSTS, overlaps=False)


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
def test_the_quick_prediction_is_what_the_simulation_does(overlaps: bool) -> None:
    """Random costs and cuts, without copies; see [Note: first and last]."""
    draws = random.Random(3)
    for _ in range(60):
        num_layers = draws.randint(1, 9)
        fused = draws.randint(1, num_layers)
        costs = LayerCosts(
            forward=tuple(draws.random() for _ in range(num_layers)),
            backward=tuple(2 * draws.random() for _ in range(num_layers)),
        )
        cut = Sizes(
            random_sizes(draws, num_layers - fused), fused, random_sizes(draws, num_layers - fused)
        )
        workload = Workload(
            num_devices=draws.randint(1, 5), num_microbatches=draws.randint(1, 9), overlaps=overlaps
        )
        passes = cut.passes(num_layers, 0)
        simulated = steady_state(passes, costs, workload).round_ms
        assert predicted_ms(passes, StageSums(costs), workload) == pytest.approx(simulated), (
            cut,
            workload,
        )


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
def test_stages_in_shares_take_as_long_as_the_group_with_the_largest_share(overlaps: bool) -> None:
    """One device in each of three groups, or two in each of two."""
    for num_devices, count, num_microbatches in ((3, 3, 6), (3, 3, 8), (4, 2, 6), (4, 2, 5)):
        workload = Workload(
            num_devices=num_devices, num_microbatches=num_microbatches, overlaps=overlaps
        )
        (passes,) = PLAN.shared(count).rounds("fused")
        simulated = steady_state(passes, COSTS, workload).round_ms
        assert step_ms(PLAN.shared(count), "fused", COSTS, workload) == pytest.approx(simulated)


@pytest.mark.parametrize(
    ("fetch_ms", "begin_ms"), [(3, [24, 28, 32]), (8, [24, 28, 36]), (14, [26, 40, 54])]
)
def test_inputs_on_the_host_come_back_beside_computes(fetch_ms: int, begin_ms: list[int]) -> None:
    """They begin at 12 ms, when the stage has its slots, and the fused stage computes until 24:
    only slow ones show."""
    costs = replace(COSTS, input_bytes=(1000 * fetch_ms,) * 6, up_ms_per_byte=0.001)
    schedule = round_robin(
        fused_passes(PLAN, 0),
        num_devices=1,
        num_microbatches=3,
        first_device=0,
        spilled=frozenset({2}),
    )
    spans = {repr(span.action): span for span in simulate([schedule], costs, overlaps=False).spans}
    assert spans["GB3.0@0"].start_ms == 12
    assert spans["X2.2@0"].end_ms == 24
    assert [spans[f"B3.{m}@0"].start_ms for m in range(3)] == begin_ms


def random_sizes(draws: random.Random, total: int) -> tuple[int, ...]:
    sizes = []
    while total:
        sizes.append(draws.randint(1, total))
        total -= sizes[-1]
    return tuple(sizes)


class Published(NamedTuple):
    """Per-layer milliseconds at 8,192 tokens on an RTX 4090, and the bubbles a round-robin plan
    reached with them.

    With 8 devices and 16 microbatches; backward without recompute.
    """

    name: str
    num_blocks: int
    forward: float
    backward: float
    head_forward: float
    head_backward: float
    sync_bubble: float
    async_bubble: float

    @property
    def costs(self) -> LayerCosts:
        """An embedding that takes no time, the blocks, the head."""
        return LayerCosts(
            forward=(0.0, *[self.forward] * self.num_blocks, self.head_forward),
            backward=(0.0, *[self.backward] * self.num_blocks, self.head_backward),
        )

    def __str__(self) -> str:
        return self.name


WRITTEN_BACK = [
    Published("1.7B", 28, 7.43, 15.8, 22.1, 43.7, 0.191, 0.040),
    Published("8B", 32, 18.5, 41.2, 37.2, 74.5, 0.143, 0.013),
    Published("32B", 64, 40.6, 91.2, 54.9, 108.0, 0.067, 0.026),
    Published("235B", 94, 43.0, 58.4, 42.4, 43.3, 0.033, 0.010),
]


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("model", WRITTEN_BACK, ids=str)
def test_the_bubble_is_no_larger_than_written_back(model: Published, overlaps: bool) -> None:
    """Steady state, 8 devices, 16 microbatches, transfers left out."""
    workload = Workload(num_devices=8, num_microbatches=16, overlaps=overlaps)
    passes = fused_passes(plan_fused(model.costs, workload), 0)
    bubble = steady_state(passes, model.costs, workload).bubble
    assert bubble < (model.async_bubble if overlaps else model.sync_bubble)


def test_an_upload_takes_the_time_of_what_it_moves() -> None:
    """Quantized weights go up in fewer bytes than they take in their slots."""
    dense = replace(COSTS, weight_bytes=(1000,) * 6, upload_bytes=(), up_ms_per_byte=0.001)
    quarter = replace(dense, upload_bytes=(250,) * 6)
    for costs, end_ms in ((dense, 2), (quarter, 0.5)):
        (upload,) = (
            span
            for span in two_calls(1, overlaps=True, costs=costs).spans
            if span.call == 0 and repr(span.action) == "UF0@0"
        )
        assert upload.end_ms == end_ms
