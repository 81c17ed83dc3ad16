"""Costs measured while running, and the plans that follow from them."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from roundpipe.device.virtual import VirtualDevice
from roundpipe.memory.pinning import HostMemory
from roundpipe.params.store import ParameterStore
from roundpipe.plan.actions import Pass
from roundpipe.plan.execute_plan import ModelExecutePlan
from roundpipe.plan.measure import (
    GraphBytes,
    LayerSize,
    Measurements,
    ShapeMeasurements,
    prior_costs,
    with_guessed_graphs,
)
from roundpipe.planner import Planner, size_class

MIB = 2**20


def size(weight_bytes: int, *, multiplied: bool = True, trains: bool = True) -> LayerSize:
    return LayerSize(weight_bytes, 2 * weight_bytes * trains, weight_bytes // 2 * multiplied, trains)


def measurements(*sizes: int) -> ShapeMeasurements:
    return ShapeMeasurements(prior_costs([size(num_bytes) for num_bytes in sizes], 0))


# The prior.


def test_prior_counts_two_operations_per_weight_and_as_many_for_each_gradient() -> None:
    """An embedding is looked up and costs next to nothing; a frozen layer passes a gradient on and makes none."""
    costs = prior_costs([size(100 * MIB, multiplied=False), size(100 * MIB), size(100 * MIB, trains=False)], 0)
    embedding, block, frozen = range(3)
    assert costs.forward[embedding] < costs.forward[block] / 100
    assert costs.backward[block] == 2 * costs.forward[block]
    assert costs.backward[frozen] == costs.forward[frozen]
    assert costs.gradient_bytes[frozen] == 0


def test_prior_has_no_backward_below_the_first_trained_layer() -> None:
    assert prior_costs([size(MIB, trains=False), size(MIB)], 1).backward[0] == 0


def test_guessed_graphs_are_those_of_a_transformer_block_of_that_size() -> None:
    """Twelve times 2048 squared weights, 8,192 tokens: 34 bytes for each of 8,192 x 2048."""
    block = LayerSize(24 * 2048**2, 48 * 2048**2, 12 * 2048**2, True)
    costs = with_guessed_graphs(
        prior_costs([block, size(MIB, multiplied=False)], 0), [block, size(MIB, multiplied=False)]
    )
    assert costs.saved_bytes == (34 * 8192 * 2048, 0)
    assert costs.input_bytes == (2 * 8192 * 2048, 0)


# Times.


def test_a_visit_shares_its_time_among_its_layers_as_the_prior_says() -> None:
    measured = measurements(100 * MIB, 300 * MIB)
    prior = measured.costs().forward
    measured.record_time(Pass.FORWARD, range(2), 10 * sum(prior))
    assert measured.costs().forward == pytest.approx([10 * ms for ms in prior])


def test_what_was_not_timed_is_scaled_like_what_was() -> None:
    """Else a plan would compare milliseconds of this machine with guesses about another."""
    measured = measurements(100 * MIB, 100 * MIB)
    before = measured.costs()
    measured.record_time(Pass.FORWARD, range(1), 7 * before.forward[0])
    after = measured.costs()
    assert after.forward == pytest.approx([7 * ms for ms in before.forward])
    assert after.recompute == pytest.approx([7 * ms for ms in before.recompute])
    assert after.backward == pytest.approx([7 * ms for ms in before.backward])


def test_times_of_overlapping_visits_come_together() -> None:
    """Layers of 1 and 3 ms, never timed alone in a backward, from visits cut in different ways."""
    measured = measurements(100 * MIB, 100 * MIB, 100 * MIB)
    truth = (1.0, 3.0, 2.0)
    for _ in range(300):
        for layers in (range(2), range(1, 3), range(3)):
            measured.record_time(Pass.FORWARD, layers, sum(truth[layer] for layer in layers))
    assert measured.costs().forward == pytest.approx(truth, rel=0.05)


def test_first_times_with_compilation_in_them_do_not_last() -> None:
    measured = measurements(100 * MIB)
    for ms in (5000.0, 10.0, 10.0):
        measured.record_time(Pass.FUSED, range(1), ms)
    costs = measured.costs()
    assert costs.forward[0] + costs.backward[0] == pytest.approx(10)


def test_later_times_are_smoothed() -> None:
    measured = measurements(100 * MIB)
    for _ in range(5):
        measured.record_time(Pass.FORWARD, range(1), 10.0)
    measured.record_time(Pass.FORWARD, range(1), 20.0)
    assert 10 < measured.costs().forward[0] < 15


def test_the_version_grows_only_with_notable_changes() -> None:
    measured = measurements(100 * MIB)
    versions = [measured.version]
    for ms in (10.0, 10.1, 20.0):
        measured.record_time(Pass.FORWARD, range(1), ms)
        versions.append(measured.version)
    for num_bytes in (1000, 1001, 2000):
        measured.record_saved_bytes(0, num_bytes)
        versions.append(measured.version)
    assert versions == [0, 1, 1, 2, 3, 3, 4]


# Bytes.


def test_saved_bytes_stand_for_layers_of_the_same_size() -> None:
    measured = measurements(100, 200, 200, 300)
    measured.record_saved_bytes(1, 7000)
    measured.record_saved_bytes(0, 10)
    assert measured.costs().saved_bytes == (10, 7000, 7000, 0)
    assert not measured.knows_graphs
    measured.record_saved_bytes(3, 5)
    measured.record_input_bytes(2, 64)
    assert measured.knows_graphs
    assert measured.costs().input_bytes == (0, 64, 64, 0)


def test_what_the_loss_keeps_counts_with_the_last_layer() -> None:
    measured = measurements(100, 200)
    measured.record_saved_bytes(1, 7000)
    measured.record_saved_bytes(2, 500, 400)
    assert measured.costs().saved_bytes == (0, 7500)
    assert measured.costs().passing_bytes == (0, 400)
    assert [measured.knows_graph(layer) for layer in range(3)] == [False, True, True]


def test_graph_bytes_count_each_storage_once_and_no_parameters() -> None:
    """A linear keeps its input; relu keeps its output; the second linear keeps that same output."""
    layer = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    graph = GraphBytes(layer.parameters())
    with torch.autograd.graph.saved_tensors_hooks(graph.pack, lambda tensor: tensor):
        output = layer(torch.ones(5, 8))
    assert graph.num_bytes == 4 * 5 * (8 + 16)
    assert graph.largest_bytes == 4 * 5 * 16
    output.sum().backward()
    assert layer[0].weight.grad is not None


def test_measurements_are_kept_by_shapes_and_shared_between_threads() -> None:
    kept, prior = Measurements(), prior_costs([size(MIB)] * 4, 0)
    assert kept.of((2, 8), prior) is kept.of((2, 8), prior)
    assert kept.of((2, 8), prior) is not kept.of((4, 8), prior)
    measured = kept.of((2, 8), prior)

    def record(layer: int) -> None:
        for _ in range(200):
            measured.record_time(Pass.BACKWARD, range(layer, layer + 1), 3.0)
            measured.record_saved_bytes(layer, 100)
            measured.costs()

    threads = [threading.Thread(target=record, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    costs = measured.costs()
    assert [r + b for r, b in zip(costs.recompute, costs.backward, strict=True)] == pytest.approx([3.0] * 4)


# Plans.


def make_planner(num_devices: int = 1, num_bytes: int | None = None, frozen: int = 0) -> Planner:
    layers = [nn.Linear(16, 16) for _ in range(8)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    store = ParameterStore(layers, HostMemory("off", accelerated=False))
    return Planner(store, [VirtualDevice(index, num_bytes) for index in range(num_devices)], layers=layers)


def fused_layers(plan: ModelExecutePlan) -> int:
    return len(plan.bwd_plan[0])


def test_a_plan_is_made_once_while_nothing_new_is_measured() -> None:
    planner = make_planner(2)
    assert planner.plan("fused", 4, None) is planner.plan("fused", 4, None)
    assert planner.plan("fused", 5, None) is not planner.plan("fused", 4, None)


def test_measured_graphs_change_the_fused_stage() -> None:
    """Before they are known half the device is left free; then they decide, and the plan changes at the next call."""
    planner = make_planner(num_bytes=100_000)
    assert fused_layers(planner.plan("fused", 2, None)) == 8
    for layer in range(8):
        planner.measured().record_saved_bytes(layer, 10_000)
    changed = planner.plan("fused", 2, None)
    assert 1 <= fused_layers(changed) < 8
    assert planner.plan("fused", 2, None) is changed


def test_the_first_plan_leaves_room_for_activations_nobody_has_seen() -> None:
    """A guess makes it careful; a guess that leaves nothing possible is not believed."""
    careful, ample = make_planner(num_bytes=10_000_000), make_planner(num_bytes=1_000_000_000)
    assert 1 <= fused_layers(careful.plan("fused", 2, None)) < 8
    assert fused_layers(ample.plan("fused", 2, None)) == 8
    assert fused_layers(make_planner(num_bytes=100_000).plan("fused", 2, None)) == 8


def test_small_gains_do_not_change_a_plan() -> None:
    """Times that waver by some percent; then one layer that is really slower, which the balance has to follow."""
    planner = make_planner(2)
    first = planner.plan("fused", 4, None)
    measured = planner.measured()
    for layer in range(8):
        for pass_ in (Pass.FORWARD, Pass.BACKWARD):
            measured.record_time(pass_, range(layer, layer + 1), (1 + 0.02 * (layer % 2)) * len(pass_.value))
    for _ in range(8):
        steady = planner.plan("fused", 4, None)
    for _ in range(10):
        measured.record_time(Pass.FORWARD, range(1), 20.0)
    for _ in range(8):
        rebalanced = planner.plan("fused", 4, None)
    assert first.fwd_plan
    assert rebalanced != steady


def test_plans_are_looked_at_again_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1, 2, 4, ... calls in which measurements changed."""
    planner, looks = make_planner(), []
    monkeypatch.setattr(planner, "problem", counting(planner.problem, looks))
    for call in range(32):
        planner.plan("fused", 2, None)
        planner.measured().record_saved_bytes(0, 2**call)
    assert len(looks) == 1 + 5


def counting(function: Callable[..., object], calls: list[object]) -> Callable[..., object]:
    def counted(*args: object) -> object:
        calls.append(args)
        return function(*args)

    return counted


def test_a_plan_that_has_run_is_kept_when_nothing_is_predicted_to_fit() -> None:
    planner = make_planner(num_bytes=100_000)
    plan = planner.plan("fused", 2, None)
    planner.measured().record_saved_bytes(3, 10_000_000)
    assert planner.plan("fused", 2, None) is plan


def test_microbatches_of_about_the_same_size_share_their_measurements() -> None:
    """Else batches without padding, each of its own length, would be planned for again and again."""
    sizes = [size_class([(torch.empty(1, length),), (torch.empty(1, 3), "text")]) for length in (1000, 1040, 2000)]
    assert sizes[0] == sizes[1] < sizes[2]
    assert size_class([()]) == 0


def test_what_trains_and_how_steps_are_taken_have_plans_of_their_own() -> None:
    planner = make_planner(3)
    overlapping = planner.problem("fused", 4)[1]
    planner.note_step(is_async=False)
    alone = planner.problem("fused", 4)[1]
    assert (overlapping.overlaps, alone.overlaps) == (True, False)
    assert not planner.problem("infer", 4)[1].overlaps
    assert make_planner(frozen=3).problem("fused", 4)[1].first_trained == 3
    assert planner.measured() is not make_planner(frozen=3).measured()
