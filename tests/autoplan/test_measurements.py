"""Costs measured while running, and the plans that follow from them."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from roundpipe.autoplan.cost_model import (
    LayerSize,
    estimate_costs,
    estimate_update_ms,
    with_guessed_graphs,
)
from roundpipe.autoplan.graph_bytes import GraphBytes
from roundpipe.autoplan.measurements import Computation, Measurements, ShapeMeasurements
from roundpipe.autoplan.planner import Planner
from roundpipe.autoplan.rates import Rates
from roundpipe.device.virtual import VirtualDevice
from roundpipe.memory.pinning import HostMemory
from roundpipe.microbatch.sizes import size_class, tokens_of
from roundpipe.params.working import ParameterStore
from roundpipe.plan.best import plan_for
from roundpipe.plan.execute_plan import ModelExecutePlan
from roundpipe.plan.schedule import group_of

MIB = 2**20


def size(weight_bytes: int, *, multiplied: bool = True, trains: bool = True) -> LayerSize:
    """Of 16-bit weights, whose gradients are summed in fp32."""
    elements = weight_bytes // 2
    return LayerSize(
        weight_bytes=weight_bytes,
        upload_bytes=weight_bytes,
        gradient_bytes=4 * elements * trains,
        offloaded_bytes=2 * elements * trains,
        matmul_elements=elements * multiplied,
        trained_elements=elements * trains,
    )


def measurements(*sizes: int) -> ShapeMeasurements:
    return ShapeMeasurements(estimate_costs([size(num_bytes) for num_bytes in sizes], 0), Rates())


# The estimate.


def test_estimate_counts_two_operations_per_weight_and_as_many_for_each_gradient() -> None:
    """An embedding is looked up and costs next to nothing; a frozen layer passes a gradient on and
    makes none."""
    costs = estimate_costs(
        [size(100 * MIB, multiplied=False), size(100 * MIB), size(100 * MIB, trains=False)], 0
    )
    embedding, block, frozen = range(3)
    assert costs.forward[embedding] < costs.forward[block] / 100
    assert costs.backward[block] == 2 * costs.forward[block]
    assert costs.backward[frozen] == costs.forward[frozen]
    assert costs.gradient_bytes[frozen] == 0


def test_estimate_has_no_backward_below_the_first_trained_layer() -> None:
    assert estimate_costs([size(MIB, trains=False), size(MIB)], 1).backward[0] == 0


def test_guessed_graphs_are_those_of_a_transformer_block_of_that_size() -> None:
    """Twelve times 2048 squared weights, 8,192 tokens: 34 bytes for each of 8,192 x 2048."""
    layers = [size(24 * 2048**2), size(MIB, multiplied=False)]
    costs = with_guessed_graphs(estimate_costs(layers, 0), layers)
    assert costs.saved_bytes == (34 * 8192 * 2048, 0)
    assert costs.input_bytes == (2 * 8192 * 2048, 0)


def test_guessed_graphs_grow_with_a_microbatch_and_shrink_with_none() -> None:
    layers = [size(24 * 2048**2)]
    guesses = [
        with_guessed_graphs(estimate_costs(layers, 0), layers, tokens).saved_bytes[0]
        for tokens in (100, 90_000)
    ]
    assert guesses == [34 * 8192 * 2048, 34 * 90_000 * 2048]


def test_inputs_are_guessed_by_their_tokens_where_they_have_no_room_to_wait() -> None:
    """Of 1,024 tokens, eight times as much was to wait on the host: 8,192 were guessed."""
    layers = [size(24 * 2048**2)]
    costs = estimate_costs(layers, 0)
    roomy, narrow = (
        with_guessed_graphs(costs, layers, 1024, has_room=room) for room in (True, False)
    )
    assert (roomy.input_bytes, narrow.input_bytes) == ((2 * 8192 * 2048,), (2 * 1024 * 2048,))
    assert roomy.saved_bytes == narrow.saved_bytes
    (wide,) = with_guessed_graphs(
        costs, [layers[0]._replace(itemsize=4)], 1024, has_room=False
    ).input_bytes
    assert wide == 4 * 1024 * 2048


def test_a_measured_graph_is_no_guess_and_says_how_wrong_the_others_are() -> None:
    """So a step that ran out of memory on its way is planned better when it is tried again."""
    layers = [size(24 * 1024**2), size(24 * 2048**2)]
    measured = ShapeMeasurements(estimate_costs(layers, 0), Rates())
    measured.record_saved_bytes(0, 2 * 34 * 8192 * 1024)
    costs = with_guessed_graphs(measured.costs(), layers)
    assert costs.saved_bytes == (2 * 34 * 8192 * 1024, 2 * 34 * 8192 * 2048)


def test_estimate_update_moves_28_bytes_for_each_parameter_that_trains() -> None:
    ms = estimate_update_ms([size(100 * MIB), size(100 * MIB, trains=False)])
    assert ms == pytest.approx(50 * MIB * 28 / 50e6)


# Times.


def test_a_layer_that_was_timed_has_its_own_times() -> None:
    measured = measurements(100 * MIB, 300 * MIB)
    computations: tuple[Computation, ...] = ("forward", "recompute", "backward")
    for number, computation in enumerate(computations):
        for layer in range(2):
            measured.record_time(computation, layer, 10.0 + number + layer / 2)
    costs = measured.costs()
    assert (costs.forward, costs.recompute, costs.backward) == ((10, 10.5), (11, 11.5), (12, 12.5))


def test_what_was_not_timed_is_like_a_layer_of_its_size_or_scaled_like_what_was() -> None:
    """Else a plan would compare milliseconds of this machine with guesses about another."""
    measured = measurements(100 * MIB, 100 * MIB, 100 * MIB, 300 * MIB)
    before = measured.costs()
    measured.record_time("forward", 0, 6 * before.forward[0])
    measured.record_time("forward", 1, 8 * before.forward[0])
    after = measured.costs()
    assert after.forward[2] == pytest.approx(7 * before.forward[2])
    assert after.forward[3] == pytest.approx(7 * before.forward[3])
    assert after.recompute == pytest.approx(after.forward)
    assert after.backward == pytest.approx([7 * ms for ms in before.backward])


def test_what_is_never_run_takes_no_time_whatever_others_of_its_size_take() -> None:
    """A frozen layer below the first trained one has no backward."""
    measured = ShapeMeasurements(estimate_costs([size(MIB, trains=False), size(MIB)], 1), Rates())
    measured.record_time("backward", 1, 5.0)
    assert measured.costs().backward == (0.0, 5.0)


def test_times_are_smoothed_and_one_hiccup_counts_for_little() -> None:
    measured = measurements(100 * MIB)
    measured.record_time("forward", 0, 10.0)
    measured.record_time("forward", 0, 1000.0)
    assert measured.costs().forward[0] == pytest.approx(13.0)
    for _ in range(40):
        measured.record_time("forward", 0, 1000.0)
    assert measured.costs().forward[0] == pytest.approx(1000.0, rel=0.01)


def test_the_version_grows_only_with_notable_changes() -> None:
    measured = measurements(100 * MIB)
    versions = [measured.version]
    for ms in (10.0, 10.1, 20.0):
        measured.record_time("forward", 0, ms)
        versions.append(measured.version)
    for num_bytes in (1000, 1001, 2000):
        measured.record_saved_bytes(0, num_bytes)
        versions.append(measured.version)
    assert versions == [0, 1, 1, 2, 3, 3, 4]


def test_many_small_changes_are_one_notable_change() -> None:
    measured = measurements(100 * MIB)
    for percent in range(20):
        measured.record_saved_bytes(0, 1000 + 10 * percent)
    assert 3 <= measured.version <= 4


# Rates.


def test_large_copies_say_more_about_the_rate_than_small_ones() -> None:
    """One of a kilobyte that took as long to begin as one of a gigabyte to arrive."""
    rates = Rates()
    assert rates.ms_per_byte("up", 7.0) == 7.0
    rates.record_copy("up", 10**9, 20.0)
    rates.record_copy("up", 1000, 0.02)
    assert rates.ms_per_byte("up", 7.0) == pytest.approx(20.0 / 10**9, rel=0.01)
    assert rates.ms_per_byte("down", 7.0) == 7.0


def test_copy_rates_belong_to_the_machine_and_not_to_shapes() -> None:
    kept, estimate = Measurements(), estimate_costs([size(MIB)] * 2, 0)
    kept.of("long", estimate).rates.record_copy("down", 1000, 5.0)
    assert kept.of("short", estimate).costs().down_ms_per_byte == 5.0 / 1000
    assert kept.of("short", estimate).version == 1


def test_the_first_update_allocates_and_is_forgotten_with_the_second() -> None:
    rates = Rates()
    assert rates.update_ms(estimate=3.0) == 3.0
    times = []
    for ms in (500.0, 40.0, 50.0):
        rates.record_update(ms)
        times.append(rates.update_ms(3.0))
    assert times == pytest.approx([500.0, 40.0, 43.0])


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


def test_sparse_tensors_that_autograd_keeps_are_passed_over() -> None:
    """Some adapters save one; it has no storage to count."""
    graph = GraphBytes([])
    for sparse in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        assert torch.equal(graph.pack(sparse).to_dense(), sparse.to_dense())
    assert graph.num_bytes == 0


def test_measurements_are_kept_by_shapes_and_shared_between_threads() -> None:
    kept, estimate = Measurements(), estimate_costs([size(MIB)] * 4, 0)
    assert kept.of((2, 8), estimate) is kept.of((2, 8), estimate)
    assert kept.of((2, 8), estimate) is not kept.of((4, 8), estimate)
    measured = kept.of((2, 8), estimate)

    def record(layer: int) -> None:
        for _ in range(200):
            measured.record_time("recompute", layer, 1.0)
            measured.record_time("backward", layer, 2.0)
            measured.record_saved_bytes(layer, 100)
            measured.costs()

    threads = [threading.Thread(target=record, args=(layer,)) for layer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    costs = measured.costs()
    assert [r + b for r, b in zip(costs.recompute, costs.backward, strict=True)] == pytest.approx(
        [3.0] * 4
    )


# Plans.


def make_planner(num_devices: int = 1, num_bytes: int | None = None, frozen: int = 0) -> Planner:
    layers = [nn.Linear(16, 16) for _ in range(8)]
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    store = ParameterStore(layers, HostMemory("off", accelerated=False))
    return Planner(
        store, [VirtualDevice(index, num_bytes) for index in range(num_devices)], layers=layers
    )


def fused_layers(plan: ModelExecutePlan) -> int:
    return len(plan.bwd_plan[0])


def test_a_plan_is_made_once_while_nothing_new_is_measured() -> None:
    planner = make_planner(2)
    first = planner.plan("fused", 4, None).plan
    planner.reconsider()
    assert planner.plan("fused", 4, None).plan is first
    assert planner.plan("fused", 5, None).plan is not first


def test_measured_graphs_change_the_fused_stage() -> None:
    """Before they are known half the device is left free; then they decide, and the plan changes at
    the next call."""
    planner = make_planner(num_bytes=100_000)
    assert fused_layers(planner.plan("fused", 2, None).plan) == 1
    for layer in range(8):
        planner.measured().record_saved_bytes(layer, 10_000)
    planner.reconsider()
    changed = planner.plan("fused", 2, None).plan
    assert 1 < fused_layers(changed) < 8
    planner.reconsider()
    assert planner.plan("fused", 2, None).plan is changed


def test_the_first_plan_leaves_room_for_activations_nobody_has_seen() -> None:
    """A guess makes it careful; a guess that leaves nothing possible refuses nothing, but every
    layer goes alone."""
    careful, ample = make_planner(num_bytes=10_000_000), make_planner(num_bytes=1_000_000_000)
    assert 1 <= fused_layers(careful.plan("fused", 2, None).plan) < 8
    assert fused_layers(ample.plan("fused", 2, None).plan) == 8
    tight = make_planner(num_bytes=100_000)
    assert {len(stage) for stage in tight.plan("fused", 2, None).plan.bwd_plan} == {1}
    assert {len(stage) for stage in tight.plan("infer", 2, None).plan.fwd_plan} == {1}


def test_the_first_plan_of_longer_sequences_leaves_more_room() -> None:
    few, many = (
        make_planner(num_bytes=40_000_000).plan("fused", 2, None, tokens=tokens).plan
        for tokens in (1000, 60_000)
    )
    assert fused_layers(many) < fused_layers(few)


def call(planner: Planner, *, times: dict[int, float] | None = None) -> ModelExecutePlan:
    """What an engine does: plans, and while devices work looks for a better plan for the next
    call."""
    planned = planner.plan("fused", 4, None)
    for layer, ms in (times or {}).items():
        planned.measured.record_time("forward", layer, ms)
        planned.measured.record_time("backward", layer, 2 * ms)
    planner.reconsider()
    return planned.plan


def test_small_gains_do_not_change_a_plan() -> None:
    """Times that waver by some percent; then one layer that is really slower, which the balance has
    to follow."""
    planner = make_planner(2)
    first = call(planner)
    for number in range(9):
        steady = call(
            planner, times={layer: 1 + 0.02 * ((layer + number) % 2) for layer in range(8)}
        )
    for _ in range(16):
        rebalanced = call(planner, times={0: 20.0})
    assert first.fwd_plan
    assert rebalanced != steady


def test_plans_are_looked_at_again_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1, 2, 4, ... calls in which measurements changed; and never while a call waits for its
    plan."""
    planner, looks = make_planner(), []
    for who in ("autoplan.planner", "plan.best"):
        monkeypatch.setattr(f"roundpipe.{who}.plan_for", counting(plan_for, looks))
    for number in range(32):
        before = len(looks)
        planned = planner.plan("fused", 2, None)
        assert len(looks) == before or number == 0
        planned.measured.record_saved_bytes(0, 2**number)
        planner.reconsider()
    assert len(looks) == 1 + 5


def counting(function: Callable[..., object], calls: list[object]) -> Callable[..., object]:
    def counted(*args: object) -> object:
        calls.append(args)
        return function(*args)

    return counted


def test_a_plan_that_has_run_is_kept_when_nothing_is_predicted_to_fit() -> None:
    planner = make_planner(num_bytes=100_000)
    plan = call(planner)
    planner.measured().record_saved_bytes(3, 10_000_000)
    call(planner)
    assert call(planner) is plan


def test_few_calls_are_timed_and_never_the_first_of_a_plan() -> None:
    """The first one compiles and allocates, whatever made the plan a new one."""
    planner = make_planner(num_bytes=100_000)
    timed = []
    for number in range(33):
        planned = planner.plan("fused", 2, None)
        timed.append(planned.is_timed)
        if number == 20:
            for layer in range(8):
                planned.measured.record_saved_bytes(layer, 10_000)
        planner.reconsider()
    assert [number for number, is_timed in enumerate(timed, 1) if is_timed] == [
        2,
        3,
        4,
        16,
        23,
        24,
        25,
    ]


def test_a_plan_is_asked_for_without_there_being_a_call() -> None:
    planner = make_planner(2)
    assert planner.next_plan("fused", 4, None) is planner.plan("fused", 4, None).plan
    assert not planner.plan("fused", 5, None).is_timed
    planner.next_plan("fused", 5, None)
    assert planner.plan("fused", 5, None).is_timed, "this is the second call"


class Filling(VirtualDevice):
    """Its memory is taken by others, and by the engine itself."""

    taken = 0

    def limit_bytes(self, held: int = 0) -> int:
        return 100_000 - self.taken + held


def test_the_limit_is_what_is_free_when_a_plan_is_made_and_what_the_engine_holds_itself() -> None:
    """While the engine does something its own use cannot be told apart, so the last answer
    stands."""
    device, held = Filling(0), {}
    store = ParameterStore(
        [nn.Linear(16, 16) for _ in range(4)], HostMemory("off", accelerated=False)
    )
    planner = Planner(store, [device], held_bytes=lambda: held)
    budgets = []
    for taken, holds in ((0, {}), (30_000, {"virtual:0": 10_000}), (90_000, None)):
        device.taken, held = taken, holds
        planned = planner.plan("fused", 2, None)
        budgets.append(planner.problem("fused", 2)[1].limit_bytes)
        planned.measured.record_saved_bytes(0, 10 + taken)
    assert budgets == [50_000, 0.9 * 80_000, 0.9 * 80_000]  # more of it once graphs are known


class Accelerated(VirtualDevice):
    """For a planner, as an accelerator."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.torch_device = torch.device("cuda", index)


def test_stages_are_shared_on_accelerators_once_a_call_has_shown_that_no_forward_writes() -> None:
    """And never on virtual devices, whose sums are the same to the bit for any number of them."""
    layers = [nn.Linear(16, 16) for _ in range(8)]
    store = ParameterStore(layers, HostMemory("off", accelerated=False))
    groups = {}
    for kind, writes in ((Accelerated, False), (Accelerated, True), (VirtualDevice, False)):
        planner = Planner(store, [kind(0), kind(1)], layers=layers)
        plans = []
        for _ in range(3):
            plans.append(planner.plan("fused", 4, None).plan)
            planner.note_writes(writes)
            planner.reconsider()
        _, workload = planner.problem("fused", 4)
        groups[kind, writes] = [
            group_of(plan.rounds("fused"), workload).num_groups for plan in plans
        ]
    assert groups == {
        (Accelerated, False): [1, 2, 2],
        (Accelerated, True): [1, 1, 1],
        (VirtualDevice, False): [1, 1, 1],
    }


def test_microbatches_of_about_the_same_size_share_their_measurements() -> None:
    """Else batches without padding, each of its own length, would be planned for again and
    again."""
    sizes = [
        size_class([(torch.empty(1, length),), (torch.empty(1, 3), "text")])
        for length in (1000, 1040, 2000)
    ]
    assert sizes[0] == sizes[1] < sizes[2]
    assert size_class([()]) == 0


def test_a_larger_microbatch_of_the_same_class_is_planned_by_its_own_size() -> None:
    """The first one seen of a class may be a fifth smaller than the last, which is more than a plan
    leaves free."""
    planner = make_planner(num_bytes=100_000)
    for elements in (1000, 1000, 1180):
        planned = planner.plan("fused", 2, None, elements=elements)
        if elements == 1000:
            last = planned
            for layer in range(9):
                planned.measured.record_saved_bytes(layer, 10_000)
            planner.reconsider()
    assert planned.measured.costs().saved_bytes[0] == 11_800
    assert fused_layers(planned.plan) < fused_layers(last.plan)
    assert planned.needs.most <= planned.needs.allowed
    planner.plan("fused", 2, None, elements=1000)
    assert planned.measured.costs().saved_bytes[0] == 11_800, "a smaller one changes nothing"


def test_token_ids_say_how_many_tokens_a_microbatch_has() -> None:
    ids = torch.zeros(2, 7, dtype=torch.int64)
    assert (
        tokens_of(
            [
                (torch.empty(3, 99), ids[:1]),
                (ids, ids, torch.ones(2, 7, 7, dtype=torch.bool), "text"),
            ]
        )
        == 14
    )
    assert tokens_of([(torch.empty(3, 99),)]) == 0


def test_what_trains_and_how_steps_are_taken_have_plans_of_their_own() -> None:
    planner = make_planner(3)
    overlapping = planner.problem("fused", 4)[1]
    planner.note_step(is_async=False)
    alone = planner.problem("fused", 4)[1]
    assert (overlapping.overlaps, alone.overlaps) == (True, False)
    assert not planner.problem("infer", 4)[1].overlaps
    assert make_planner(frozen=3).problem("fused", 4)[1].first_trained == 3
    assert planner.measured() is not make_planner(frozen=3).measured()


def test_a_backward_that_goes_on_to_the_inputs_is_planned_for_by_itself() -> None:
    """Unless it goes through all layers in any case."""
    planner = make_planner(frozen=3)
    ends, goes_on = (
        planner.plan("fused", 4, None, wants_gradients=wanted) for wanted in (False, True)
    )
    assert [planner.problem_of(planned)[1].first_trained for planned in (ends, goes_on)] == [3, 0]
    assert [planner.problem_of(planned)[0].backward[0] > 0 for planned in (ends, goes_on)] == [
        False,
        True,
    ]
    assert planner.measured() is goes_on.measured is not ends.measured
    planner = make_planner()
    one, other = (
        planner.plan("fused", 4, None, wants_gradients=wanted) for wanted in (False, True)
    )
    assert one.measured is other.measured
