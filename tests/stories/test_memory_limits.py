"""A device's memory was exceeded by what no plan had counted, though each plan by itself had room.

The parts of a model that is no sequence peaked at nearly twice `max_gpu_memory`. A backward round
held the gradients that it had handed on until the whole backward pass was over. The worker ran
ahead of the copies that were to take kept inputs and gradients down to the host, stage run after
stage run, and all that time their memory was in use. Outputs were not counted, and those left on
the device were copied there for fear that somebody else might hold them. Parts were promised room
by guesses in the first call, although the size of what goes in is known. And where no guess fitted,
the planner's error held all that its callers had on devices, until a collection came.

Long sequences through a large frozen model: before anything was measured, layers stayed on the
device as if there were no activations; slots of an earlier plan were kept, and those given back
were held by replicas waiting for their next stage run; and a plan that had run out of memory was
tried again and again. A frozen model whose inputs train was planned for as if it had no backward.

The devices here count what is on them. The adversarial one copies as late as it may.
"""

import copy
import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import (
    ModelExecutePlan,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from roundpipe.autoplan.free_memory import FreeMemory
from roundpipe.device import VirtualDevice
from roundpipe.memory.slots import SlotPool
from roundpipe.testing.adversarial import AdversarialDevice
from tests.support.device_sets import ONE
from tests.support.engines import engine_gradients
from tests.support.models import Batch
from tests.support.reference import plain_call

WIDTH, ROWS, MICROBATCHES = 64, 4096, 4
INPUT = 4 * WIDTH * ROWS
AMPLE = 1 << 40


class Limited(VirtualDevice):
    """Has plenty of memory, of which an engine may use so much."""

    def __init__(self, limit: int) -> None:
        super().__init__(0, AMPLE)
        self.limit = limit

    def limit_bytes(self, held: int = 0) -> int:
        return self.limit


class LimitedAdversary(AdversarialDevice):
    def __init__(self, limit: int) -> None:
        super().__init__(0, num_bytes=AMPLE)
        self.limit = limit

    def limit_bytes(self, held: int = 0) -> int:
        return self.limit


def used_at_most(device: Limited | LimitedAdversary) -> int:
    """Since it was last asked."""
    assert device.capacity is not None
    peak, device.capacity.peak = device.capacity.peak, device.capacity.used
    return peak


of_both_kinds = pytest.mark.parametrize("kind", [Limited, LimitedAdversary])


@pytest.fixture(autouse=True)
def only_counting_references() -> Iterator[None]:
    """What is in a circle of references stays where it is."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Chain(nn.Module):
    """Elements of a list, whose inputs are much larger than their weights."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(length))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squared(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


@of_both_kinds
@pytest.mark.parametrize("inputs", [6, pytest.param(12, marks=pytest.mark.slow)])
def test_parts_together_stay_under_the_limit(kind: Any, inputs: int) -> None:
    """Room for some of eight inputs. They all are kept for their backwards, each of a part whose
    own plan has room."""
    torch.manual_seed(0)
    model, x = Chain(8), torch.randn(ROWS, WIDTH)
    expected = plain_call(copy.deepcopy(model), Batch((x,), {}, None, squared).whole(), squared)
    device = kind(inputs * INPUT)
    with wrap_model_to_roundpipe(
        model,
        devices=[device],
        lower_threshold=1,
        upper_threshold=0,
        model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES),
    ) as engine:
        for _ in range(4):
            engine.zero_grad()
            squared(engine(x), None).backward()
        assert used_at_most(device) < device.limit
        engine.synchronize()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        ONE.check(found, expected.gradients, bitwise=False)


@of_both_kinds
def test_outputs_that_are_still_on_the_device_count(kind: Any) -> None:
    """All microbatches' outputs are there before the caller gets the first: kept inputs give way to
    them."""
    torch.manual_seed(0)
    layers = [*(nn.Linear(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 4 * WIDTH)]
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)
    expected = plain_call(copy.deepcopy(model), Batch((x,), {}, None, squared).whole(), squared)
    single = [range(layer, layer + 1) for layer in range(7)]
    config = RoundPipeRunConfig(
        num_microbatch=MICROBATCHES, execute_plan=ModelExecutePlan(single, single[::-1])
    )
    device = kind(9 * INPUT)
    with RoundPipe(model, devices=[device], model_run_config=config) as engine:
        for _ in range(3):
            engine.zero_grad()
            squared(engine(x), None).backward()
        assert used_at_most(device) < device.limit
        ONE.check(engine_gradients(engine), expected.gradients, bitwise=False)


@of_both_kinds
def test_chained_engines_let_go_of_what_they_have_handed_on(kind: Any) -> None:
    """Twelve engines in a row on one device, their kept inputs on the host: what flows between two
    of them is there only while it does, both ways."""
    torch.manual_seed(0)
    layers, x = [nn.Linear(WIDTH, WIDTH) for _ in range(12)], torch.randn(ROWS, WIDTH)
    batch = Batch((x,), {}, x, squared)
    expected = plain_call(copy.deepcopy(nn.Sequential(*layers)), batch.split(MICROBATCHES), squared)
    device = kind(3 * INPUT)
    unmerged = RoundPipeRunConfig(num_microbatch=MICROBATCHES, merge_output=False)
    made = [RoundPipe(layer, devices=[device], model_run_config=unmerged) for layer in layers]
    try:
        hidden: Any = x
        for engine in made:
            hidden = engine(hidden)
        assert isinstance(hidden, RoundPipePackedData)
        assert used_at_most(device) < 5 * INPUT
        sum((squared(value, None) for value in hidden), torch.zeros(())).backward()
        assert used_at_most(device) < 5 * INPUT
        found = {
            f"{index}.{name}": gradient
            for index, engine in enumerate(made)
            for name, gradient in engine_gradients(engine).items()
        }
        ONE.check(found, expected.gradients, bitwise=False)
    finally:
        for engine in made:
            engine.close()


def test_gradients_are_down_before_more_are_made() -> None:
    """While a stage run sums, those of one stage run more may be on their way, however late the
    copies are."""
    torch.manual_seed(0)
    layers, x = [nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(10)], torch.randn(8, 4 * WIDTH)
    single = [range(layer, layer + 1) for layer in range(10)]
    plan = ModelExecutePlan(single[:-1], single[::-1])
    peaks = []
    for kind in (Limited, LimitedAdversary):
        device = kind(1)  # so that no slot stays
        with RoundPipe(nn.Sequential(*copy.deepcopy(layers)), devices=[device]) as engine:
            for _ in range(2):
                used_at_most(device)
                engine.forward_backward(
                    (x,),
                    loss_fn=squared,
                    run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=plan),
                )
                engine.synchronize()
        peaks.append(used_at_most(device))
    assert peaks[1] <= peaks[0] + 1.1 * layers[0].weight.nbytes


def frozen_but_the_last(length: int) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(length)))
    model[:-1].requires_grad_(requires_grad=False)
    return model


@of_both_kinds
def test_what_an_earlier_plan_needed_is_given_back(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FreeMemory, "resident_layers", lambda *_, **__: frozenset())
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12)))
    device = kind(8 * sum(parameter.nbytes for parameter in model[0].parameters()))
    layers = [range(index, index + 1) for index in range(12)]
    whole, by_layer = ModelExecutePlan([], [range(12)]), ModelExecutePlan(layers[:-1], layers[::-1])
    with RoundPipe(model, devices=[device]) as engine:
        for plan in (whole, by_layer, by_layer):
            config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
            engine.forward_backward((torch.randn(4, WIDTH),), loss_fn=squared, run_config=config)
            engine.synchronize()
        used_at_most(device)
        assert used_at_most(device) < 4 * sum(
            parameter.nbytes for parameter in model[0].parameters()
        )


@of_both_kinds
def test_slots_of_plans_in_turn_stay_where_there_is_room(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training and evaluation, or short and long batches: to give slots back is to wait for
    lanes."""
    monkeypatch.setattr(FreeMemory, "resident_layers", lambda *_, **__: frozenset())
    dropped: list[int] = []
    keep_only = SlotPool.keep_only
    monkeypatch.setattr(
        SlotPool, "keep_only", lambda *given: (dropped.append(1), keep_only(*given))
    )
    model, device = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(12))), kind(AMPLE)
    layers = [range(index, index + 1) for index in range(12)]
    whole, by_layer = ModelExecutePlan([], [range(12)]), ModelExecutePlan(layers[:-1], layers[::-1])
    with RoundPipe(model, devices=[device]) as engine:
        for plan in (whole, by_layer, whole, by_layer):
            config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
            engine.forward_backward((torch.randn(4, WIDTH),), loss_fn=squared, run_config=config)
            engine.synchronize()
        assert not dropped


@of_both_kinds
def test_layers_do_not_stay_where_guesses_leave_no_room(kind: Any) -> None:
    """Of the first call: inputs are large, and nothing is known of what layers keep."""
    model, x = frozen_but_the_last(48), torch.randn(64, WIDTH)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    device = kind(weights + weights // 4)
    with RoundPipe(model, devices=[device]) as engine:
        engine.forward_backward((x,), loss_fn=squared)
        engine.synchronize()
        used_at_most(device)
        assert used_at_most(device) < weights // 2


class Wasteful(nn.Linear):
    """Needs much more inside than is kept of it."""

    times = 4

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.detach().repeat(self.times, 1)
        return super().forward(x).relu()


def wasteful_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Wasteful(WIDTH, WIDTH) for _ in range(8)), nn.Dropout(0.1))


def forward_backward(engine: RoundPipe, x: Tensor) -> None:
    engine.forward_backward((x,), loss_fn=squared)


def forward_then_backward(engine: RoundPipe, x: Tensor) -> None:
    squared(engine(x), None).backward()


ONE_MICROBATCH = RoundPipeRunConfig(num_microbatch=1)


def trained(call: Any, size: int) -> tuple[dict[str, Tensor], torch.Tensor]:
    """Gradients of three calls on a device for so many inputs, and the generator's state after
    them."""
    model, x = wasteful_model(), torch.randn(ROWS, WIDTH)
    with RoundPipe(
        model, devices=[VirtualDevice(0, size * INPUT)], model_run_config=ONE_MICROBATCH
    ) as engine:
        for _ in range(3):
            call(engine, x)
            engine.synchronize()
    return {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }, torch.get_rng_state()


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (forward_backward, 8),
        (forward_backward, 10),
        (forward_backward, 14),
        (forward_then_backward, 10),
    ],
)
def test_a_call_that_ran_out_of_memory_is_made_again(
    call: Any, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected, state = trained(call, 1000)
    assert "made again" not in caplog.text
    found, reached = trained(call, size)
    assert "made again with less on its devices" in caplog.text
    ONE.check(found, expected)
    assert torch.equal(state, reached)


def test_the_last_try_is_with_hardly_anything_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer needs inside may be nearly all there is."""
    monkeypatch.setattr(Wasteful, "times", 16)
    expected, _ = trained(forward_backward, 1000)
    found, _ = trained(forward_backward, 20)
    ONE.check(found, expected)


def test_a_plan_whose_backward_ran_out_of_memory_is_not_tried_again() -> None:
    model, x = wasteful_model(), torch.randn(ROWS, WIDTH)
    failures = 0
    with RoundPipe(
        model, devices=[VirtualDevice(0, 8 * INPUT)], model_run_config=ONE_MICROBATCH
    ) as engine:
        for _ in range(8):
            try:
                forward_then_backward(engine, x)
                engine.synchronize()
            except torch.OutOfMemoryError:
                failures += 1
    assert failures == 1


def test_what_never_fits_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    model, x = wasteful_model(), torch.randn(ROWS, WIDTH)
    with RoundPipe(
        model, devices=[VirtualDevice(0, 3 * INPUT)], model_run_config=ONE_MICROBATCH
    ) as engine:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            forward_backward(engine, x)
        assert "virtual:0 is out of memory" in str(caught.value)
        assert caplog.text.count("made again") == 3
        assert engine.devices[0].capacity.used < 2 * INPUT  # though the error is kept
        forward_backward(engine, x[:64])


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("too much")


class Unused(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).relu()
        return super().forward(x)


@pytest.mark.parametrize("layer", [Failing, Unused])
def test_a_graph_goes_that_no_backward_goes_through(layer: type[nn.Linear]) -> None:
    model, device = (
        nn.Sequential(Wasteful(WIDTH, WIDTH), layer(WIDTH, WIDTH)),
        VirtualDevice(0, AMPLE),
    )
    config = replace(ONE_MICROBATCH, execute_plan=ModelExecutePlan([], [range(2)]))
    with RoundPipe(model, devices=[device], model_run_config=config) as engine:
        with suppress(torch.OutOfMemoryError):
            forward_backward(engine, torch.randn(ROWS, WIDTH))
        engine.synchronize()
        assert device.capacity is not None
        assert device.capacity.used < INPUT


@of_both_kinds
def test_layers_do_not_stay_where_a_forward_keeps_inputs_for_its_backward(kind: Any) -> None:
    """The two are calls of their own, each of which had room for layers beside what it needs
    itself."""
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(48))), torch.randn(64, WIDTH)
    model[1:].requires_grad_(requires_grad=False)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    device = kind(weights + weights // 2)
    with RoundPipe(model, devices=[device], model_run_config=ONE_MICROBATCH) as engine:
        for _ in range(6):
            forward_then_backward(engine, x)
            engine.synchronize()
        assert used_at_most(device) < device.limit


def test_layers_that_stayed_give_way_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the user's own plan nothing else can, once inputs are on the host."""
    monkeypatch.setattr(Wasteful, "times", 0)
    model = nn.Sequential(*(Wasteful(WIDTH, WIDTH) for _ in range(48)))
    model[:-1].requires_grad_(requires_grad=False)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    x, layers = torch.randn(64, WIDTH), [range(index, index + 1) for index in range(48)]
    plan = ModelExecutePlan(layers[:-1], layers[::-1])
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    device = VirtualDevice(0, 2 * weights)
    with RoundPipe(model, devices=[device], model_run_config=config) as engine:
        for _ in range(3):
            forward_backward(engine, x)
            engine.synchronize()
        assert device.capacity is not None
        assert device.capacity.used > weights // 2  # they stay
        monkeypatch.setattr(Wasteful, "times", 3 * weights // 2 // x.nbytes)
        forward_backward(engine, x)
    assert "made again with less on its devices" in caplog.text


@of_both_kinds
@pytest.mark.parametrize("call", [forward_backward, forward_then_backward])
def test_a_frozen_model_hands_gradients_on_within_the_limit(call: Any, kind: Any) -> None:
    """To a projector in front of it, for example: its backward keeps as much as if it trained."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(24)))
    model.requires_grad_(requires_grad=False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    device = kind(4 * INPUT)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    with RoundPipe(model, devices=[device], model_run_config=config) as engine:
        for _ in range(3):
            call(engine, x)
            engine.synchronize()
        assert used_at_most(device) < device.limit
