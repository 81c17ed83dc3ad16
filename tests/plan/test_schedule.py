"""Drawings of what each device is told to do. ``F3.1@0``: forward, stage 3, microbatch 1, device
0."""

import pytest

from roundpipe import ModelExecutePlan
from roundpipe.plan.schedule import Schedule, fused_passes, round_robin, saved_layers

PLAN = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 6), range(3, 4), range(3)]
)

# U uploads the stage's weights, L offloads its gradients, R releases its slots; X is the fused
# stage. Each device uploads its next stage as soon as it has queued the computes of the one before.
DRAWINGS = {
    1: [
        "UF0@0 F0.0@0 F0.1@0 UF1@0 RF0@0 F1.0@0 F1.1@0 UX2@0 RF1@0 X2.0@0 X2.1@0 UB3@0 LX2@0 RX2@0 "
        "B3.0@0 B3.1@0 UB4@0 LB3@0 RB3@0 B4.0@0 B4.1@0 LB4@0 RB4@0"
    ],
    2: [
        "UF0@0 F0.0@0 F0.1@0 UX2@0 RF0@0 X2.0@0 X2.1@0 UB4@0 LX2@0 RX2@0 B4.0@0 B4.1@0 LB4@0 RB4@0",
        "UF1@1 F1.0@1 F1.1@1 UB3@1 RF1@1 B3.0@1 B3.1@1 LB3@1 RB3@1",
    ],
    3: [
        "UF0@0 F0.0@0 F0.1@0 UB3@0 RF0@0 B3.0@0 B3.1@0 LB3@0 RB3@0",
        "UF1@1 F1.0@1 F1.1@1 UB4@1 RF1@1 B4.0@1 B4.1@1 LB4@1 RB4@1",
        "UX2@2 X2.0@2 X2.1@2 LX2@2 RX2@2",
    ],
    8: [
        "UF0@0 F0.0@0 F0.1@0 RF0@0",
        "UF1@1 F1.0@1 F1.1@1 RF1@1",
        "UX2@2 X2.0@2 X2.1@2 LX2@2 RX2@2",
        "UB3@3 B3.0@3 B3.1@3 LB3@3 RB3@3",
        "UB4@4 B4.0@4 B4.1@4 LB4@4 RB4@4",
        "",
        "",
        "",
    ],
}


# Every stage in two shares of the three microbatches: two devices work beside each other, four in
# two pipelines.
IN_TWO = ModelExecutePlan(
    fwd_plan=[range(3), range(3)], bwd_plan=[range(3, 6), range(3, 6), range(3), range(3)]
)
SHARED_DRAWINGS = {
    1: [
        "UF0@0 F0.0@0 F0.1@0 UF0@0 RF0@0 F0.2@0 UX1@0 RF0@0 X1.0@0 X1.1@0 UX1@0 LX1@0 RX1@0 X1.2@0 "
        "UB2@0 LX1@0 RX1@0 "
        "B2.0@0 B2.1@0 UB2@0 LB2@0 RB2@0 B2.2@0 LB2@0 RB2@0"
    ],
    2: [
        "UF0@0 F0.0@0 F0.1@0 UX1@0 RF0@0 X1.0@0 X1.1@0 UB2@0 LX1@0 RX1@0 B2.0@0 B2.1@0 LB2@0 RB2@0",
        "UF0@1 F0.2@1 UX1@1 RF0@1 X1.2@1 UB2@1 LX1@1 RX1@1 B2.2@1 LB2@1 RB2@1",
    ],
    4: [
        "UF0@0 F0.0@0 F0.1@0 UB2@0 RF0@0 B2.0@0 B2.1@0 LB2@0 RB2@0",
        "UF0@1 F0.2@1 UB2@1 RF0@1 B2.2@1 LB2@1 RB2@1",
        "UX1@2 X1.0@2 X1.1@2 LX1@2 RX1@2",
        "UX1@3 X1.2@3 LX1@3 RX1@3",
    ],
}


def schedule(num_devices: int, first_device: int = 0, first_trained: int = 0) -> Schedule:
    passes = fused_passes(PLAN, first_trained)
    return round_robin(
        passes, num_devices=num_devices, num_microbatches=2, first_device=first_device
    )


def draw(drawn: Schedule) -> list[str]:
    return [" ".join(map(repr, actions)) for actions in drawn.actions]


@pytest.mark.parametrize("num_devices", DRAWINGS)
def test_drawing(num_devices: int) -> None:
    assert draw(schedule(num_devices)) == DRAWINGS[num_devices]


@pytest.mark.parametrize(
    ("num_devices", "after"), [(1, [0, 0, 0]), (2, [1, 0, 1]), (3, [2, 1, 0]), (8, [5, 2, 7])]
)
def test_round_robin_carries_on_across_calls(num_devices: int, after: list[int]) -> None:
    """Five stage runs a call: the next call's first stage run goes where this call's sixth would
    have gone."""
    position, positions = 0, []
    for _ in range(3):
        drawn = schedule(num_devices, position)
        assert drawn.stage_runs[0].device == position
        position = drawn.next_device
        positions.append(position)
    assert positions == after


def test_a_later_call_is_the_same_drawing_on_other_devices() -> None:
    assert draw(schedule(3, first_device=2)) == [
        "UF1@0 F1.0@0 F1.1@0 UB4@0 RF1@0 B4.0@0 B4.1@0 LB4@0 RB4@0",
        "UX2@1 X2.0@1 X2.1@1 LX2@1 RX2@1",
        "UF0@2 F0.0@2 F0.1@2 UB3@2 RF0@2 B3.0@2 B3.1@2 LB3@2 RB3@2",
    ]


def test_nothing_below_the_first_trained_layer_is_visited_backward() -> None:
    """Layers 0 to 2 are frozen: the last backward stage is gone, and no forward stage run keeps an
    input for it."""
    assert draw(schedule(3, first_trained=3)) == [
        "UF0@0 F0.0@0 F0.1@0 UB3@0 RF0@0 B3.0@0 B3.1@0 LB3@0 RB3@0",
        "UF1@1 F1.0@1 F1.1@1 RF1@1",
        "UX2@2 X2.0@2 X2.1@2 LX2@2 RX2@2",
    ]
    assert saved_layers(fused_passes(PLAN, 3)) == {3}
    assert fused_passes(PLAN, 1)[-1][1] == range(1, 3)


@pytest.mark.parametrize("num_devices", SHARED_DRAWINGS)
def test_drawing_of_stages_visited_in_shares(num_devices: int) -> None:
    passes = fused_passes(IN_TWO, 0)
    drawn = round_robin(passes, num_devices=num_devices, num_microbatches=3, first_device=0)
    assert draw(drawn) == SHARED_DRAWINGS[num_devices]


def test_shares_are_as_equal_as_they_can_be_and_never_empty() -> None:
    """Only the fused stage is shared: the others are visited for all microbatches."""
    passes = fused_passes(ModelExecutePlan([range(4)], [*[range(4, 6)] * 3, range(4)]), 0)

    def microbatches(count: int) -> list[range]:
        return [
            v.microbatches
            for v in round_robin(
                passes, num_devices=3, num_microbatches=count, first_device=0
            ).stage_runs
        ]

    assert microbatches(7) == [range(7), range(3), range(3, 5), range(5, 7), range(7)]
    assert microbatches(2) == [range(2), range(1), range(1, 2), range(2)]


def test_inputs_that_wait_on_the_host_come_back_one_microbatch_ahead() -> None:
    """G fetches them: for the first microbatch before the device waits for a gradient, then behind
    each other."""
    passes = fused_passes(PLAN, 0)
    drawn = round_robin(
        passes,
        num_devices=2,
        num_microbatches=3,
        first_device=0,
        spilled=frozenset({0, 3}) & saved_layers(passes),
    )
    assert draw(drawn) == [
        "UF0@0 F0.0@0 F0.1@0 F0.2@0 UX2@0 RF0@0 X2.0@0 X2.1@0 X2.2@0 UB4@0 LX2@0 RX2@0 "
        "GB4.0@0 GB4.1@0 B4.0@0 GB4.2@0 B4.1@0 B4.2@0 LB4@0 RB4@0",
        "UF1@1 F1.0@1 F1.1@1 F1.2@1 UB3@1 RF1@1 GB3.0@1 GB3.1@1 B3.0@1 GB3.2@1 B3.1@1 B3.2@1 LB3@1 "
        "RB3@1",
    ]
