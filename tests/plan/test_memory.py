"""What a plan is predicted to hold at most, see [Note: device memory] in plan/memory.py."""

from dataclasses import replace

import pytest

from roundpipe.memory.slot_sizes import ALIGNMENT, slot_bytes
from roundpipe.plan.actions import Pass, Passes
from roundpipe.plan.costs import LayerCosts, StageSums, Workload
from roundpipe.plan.memory import PeakBytes, predicted_peak, readable, slot_counts

F, X, B = Pass.FORWARD, Pass.FUSED, Pass.BACKWARD

# Powers of ten and digits, so that a sum says what is in it; weights as large as the smallest slot
# is.
COSTS = LayerCosts(
    forward=(1.0,) * 4,
    backward=(2.0,) * 4,
    weight_bytes=(ALIGNMENT,) * 4,
    gradient_bytes=(100, 200, 300, 400),
    saved_bytes=(1000, 2000, 3000, 4000),
    input_bytes=(1, 2, 3, 4),
)


def peak(passes: Passes, num_devices: int = 1, **more: int | str) -> PeakBytes:
    workload = Workload(num_devices=num_devices, num_microbatches=5, **more)  # type: ignore[arg-type]
    return predicted_peak(passes, StageSums(COSTS), workload)


def test_one_fused_stage() -> None:
    """All weights, all graphs of one microbatch, all sums; its input comes from the host, one
    microbatch at a time."""
    assert peak([(X, range(4))]) == PeakBytes(
        slots=4 * ALIGNMENT, graph=10_000, sums=1000, boundaries=1
    )


def test_the_next_stage_is_on_its_way_up() -> None:
    """Two layers run and one prefetched: three slots, though no stage has more than two layers."""
    assert peak([(F, range(2)), (X, range(2, 3))]).slots == 3 * ALIGNMENT
    assert peak([(F, range(1)), (F, range(1, 2)), (F, range(2, 4))]).slots == 3 * ALIGNMENT


def test_slots_of_different_sizes_do_not_stand_in_for_each_other() -> None:
    """But those of nearly the same do."""
    costs = LayerCosts(
        forward=(1.0,) * 3, backward=(1.0,) * 3, weight_bytes=(40_000, 30_000, 40_100)
    )
    stage_runs: Passes = [(F, range(1)), (F, range(1, 2)), (F, range(2, 3))]
    found = predicted_peak(
        stage_runs, StageSums(costs), Workload(num_devices=1, num_microbatches=1)
    )
    assert found.slots == slot_bytes(40_000) + slot_bytes(30_000)


@pytest.mark.parametrize("num_bytes", [1, 256, 257, 10_000, 622_329_856, 622_333_952])
def test_a_slot_is_hardly_larger_than_what_it_is_for(num_bytes: int) -> None:
    assert num_bytes <= slot_bytes(num_bytes) < max(num_bytes + ALIGNMENT, num_bytes * (1 + 1 / 63))


def test_a_head_goes_where_an_embedding_was() -> None:
    embedding, norm = 151_936 * 2048 * 2, 2048 * 2
    assert slot_bytes(embedding) == slot_bytes(embedding + norm)


def test_gradients_still_offloading_beside_those_of_the_next_stage_run() -> None:
    assert peak([(F, range(2)), (X, range(2, 4)), (B, range(2))]).sums == 700
    assert peak([(F, range(3)), (X, range(3, 4)), (B, range(3))]).sums == 1000


@pytest.mark.parametrize(("grain", "graph"), [("stage", 6000), ("layer", 3000 + 2 + 3)])
def test_recompute_by_layer_holds_the_largest_graph_and_the_inputs_of_the_others(
    grain: str, graph: int
) -> None:
    """The input of the stage's first layer is the saved one, counted with the boundaries."""
    found = peak([(F, range(3)), (B, range(3))], grain=grain)
    assert found.graph == graph


def test_the_largest_gradient_passes_through_one_layer_at_a_time() -> None:
    costs = replace(COSTS, passing_bytes=(500, 900, 100, 700), weight_bytes=(1,) * 4)
    found = predicted_peak(
        [(X, range(4))], StageSums(costs), Workload(num_devices=1, num_microbatches=5)
    )
    assert found.graph == 10_000 + 900


def test_where_most_weights_are_frozen_two_gradients_pass_at_once() -> None:
    """No activation was kept for a weight's gradient, so none goes while they pass."""
    costs = replace(
        COSTS,
        passing_bytes=(500, 900, 100, 700),
        gradient_bytes=(0, 1, 0, 1),
        offloaded_bytes=(0, 1, 0, 1),
    )
    found = predicted_peak(
        [(X, range(4))], StageSums(costs), Workload(num_devices=1, num_microbatches=5)
    )
    assert found.graph == 10_000 + 2 * 900


def test_frozen_layers_keep_no_graph() -> None:
    assert peak([(X, range(4))], first_trained=2).graph == 7000


def test_one_device_keeps_inputs_for_backward_stage_runs_and_what_moves_on() -> None:
    """Five microbatches each: inputs of layers 0 and 2, then what the last forward stage run made,
    the input of layer 3."""
    stage_runs: Passes = [
        (F, range(2)),
        (F, range(2, 3)),
        (X, range(3, 4)),
        (B, range(2, 3)),
        (B, range(2)),
    ]
    backward_of_2 = 5 * 1 + 5 * 3 + 5 * 4
    assert peak(stage_runs).boundaries == backward_of_2
    assert peak(stage_runs[:2]).boundaries == 3 + 5 * 4


def test_several_devices_share_the_kept_inputs() -> None:
    costs = LayerCosts(forward=(1.0,) * 4, backward=(2.0,) * 4, input_bytes=(0, 7, 7, 7))
    stage_runs: Passes = [
        *((F, range(i, i + 1)) for i in range(3)),
        (X, range(3, 4)),
        *((B, range(i, i + 1)) for i in (2, 1, 0)),
    ]
    alone, shared = (
        predicted_peak(
            stage_runs, StageSums(costs), Workload(num_devices=devices, num_microbatches=6)
        )
        for devices in (1, 3)
    )
    assert shared.total < alone.total


def test_numbers_for_people() -> None:
    assert [readable(n) for n in (0, 999, 1536, 20 * 2**20, 3 * 2**30)] == [
        "0 B",
        "999 B",
        "1.5 KiB",
        "20 MiB",
        "3 GiB",
    ]
    assert (
        str(PeakBytes(2**20, 0, 0, 2**20))
        == "2 MiB (slots 1 MiB, graph 0 B, sums 0 B, boundaries 1 MiB)"
    )


def test_a_device_without_a_stage_run_needs_no_slots() -> None:
    """A round has fewer stage runs than there are devices."""
    assert slot_counts([], COSTS.weight_bytes, num_devices=1) == {slot_bytes(ALIGNMENT): 0}
