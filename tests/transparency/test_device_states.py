"""Layers whose optimizer state lives on the device ([Note: device states]): nobody can tell, but by
the time and the memory."""

import copy
import gc
import inspect
import io
import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.autoplan.free_memory import FreeMemory
from roundpipe.autoplan.planner import Planner
from roundpipe.device.virtual import VirtualDevice
from roundpipe.memory.copier import NUM_SLICES, PinnedCopier
from roundpipe.memory.pinning import HostMemory
from roundpipe.optim import SGD, Adam, AdamW, Lion
from roundpipe.params.placement.device_state import DeviceState, state_bytes
from roundpipe.params.placement.device_states import DeviceStates
from roundpipe.params.placement.held import Held, free
from roundpipe.params.placement.newest import Whereabouts
from roundpipe.params.working import LayerParameters
from roundpipe.plan.execute_plan import ModelExecutePlan
from roundpipe.runtime.worker_pool import WorkerPool
from roundpipe.step.write_back import WriteBack
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines
from tests.support.injection import Places

WIDTH, ROWS, STEPS = 16, 6, 8
PLENTY = 16_000_000  # bytes of a device
PLENTY_AS_LIMIT = f"{PLENTY}B"
SPARE_BYTES = FreeMemory.left_bytes
FETCHING = tuple(map(inspect.getfile, (Held, DeviceState, PinnedCopier, VirtualDevice)))
PAGEABLE = HostMemory("off", accelerated=False)
Touch = Callable[[RoundPipe, torch.optim.Optimizer], Any]


class TiedHead(nn.Module):
    """Multiplies with another layer's weight, and has some of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.norm(hidden) @ self.weight
        return output


class Borrower(nn.Module):
    """Has no weight but one that is tied."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight


class AddsNothing(nn.Module):
    """Has a weight, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale + self.nothing.sum(0)


def make_model(tied: type[nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4)
    ]
    weight = blocks[0][0].weight
    return nn.Sequential(*blocks, *([tied(weight)] if tied is not None else []))  # type: ignore[call-arg]


@pytest.fixture(autouse=True)
def _device_states_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an asynchronous run takes them only if updates turn out to be slow."""
    monkeypatch.setattr(Planner, "hides_update", lambda *_: False)


class Run:
    """Some steps, and what there is in the end: losses, weights, masters and optimizer state."""

    def __init__(
        self,
        engine: RoundPipe,
        make_optimizer: Callable[..., torch.optim.Optimizer] = AdamW,
        *,
        is_async: bool,
        touch: Touch | None = None,
        every_step: bool = False,
    ) -> None:
        torch.manual_seed(1)
        optimizer = make_optimizer(engine.optim_parameters(), lr=1e-2)
        self.results: list[Tensor] = []
        norms: list[Tensor] = []
        self.device_state_bytes: list[int] = []

        def step() -> None:
            norms.append(roundpipe.clip_grad_norm_(optimizer, 0.5))
            optimizer.step()

        for number in range(STEPS):
            x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
            self.results.append(
                engine.forward_backward(
                    (x,), label=y, loss_fn=lambda out, y: ((out - y) ** 2).sum() / ROWS
                )
            )
            if number == 0:
                know_graphs(engine)
            engine.step(step, is_async=is_async)
            if touch is not None and (every_step or number == STEPS // 2):
                touch(engine, optimizer)
            if number >= STEPS // 2:
                engine.synchronize()
            self.device_state_bytes.append(engine.statistics()["device_state_bytes"])
        masters = [master.detach().clone() for master in engine.optim_parameters()]
        engine.close()
        self.results += (
            norms
            + [parameter.detach().clone() for parameter in engine.model.parameters()]
            + masters
        )
        for state in optimizer.state.values():
            self.results += [value.clone() for value in state.values() if isinstance(value, Tensor)]

    def agrees_with(self, other: "Run") -> bool:
        pairs = zip(self.results, other.results, strict=True)
        return all(torch.equal(one, another) for one, another in pairs)


def know_graphs(engine: RoundPipe) -> None:
    """Device states are taken only once graphs are measured, which the first look at the plan may
    come too early for."""
    engine.synchronize()
    for _ in range(2):
        engine.planner.reconsider()


def run(
    engines: Engines, room: float | None, *, tied: type[nn.Module] | None = None, **settings: Any
) -> Run:
    """On a device that leaves so much room; of no size, because counting what is on one takes
    time."""
    engine = engines(make_model(tied), model_run_config=RoundPipeRunConfig(num_microbatch=3))
    if room is not None and FreeMemory.left_bytes is SPARE_BYTES:
        engine._runner.memory.free.left_bytes = lambda _: room  # type: ignore[method-assign, assignment]
    return Run(engine, **settings)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "AdamW amsgrad": lambda params, lr: AdamW(params, lr=lr, amsgrad=True),
    "Adam decay": lambda params, lr: Adam(params, lr=lr, weight_decay=0.1, maximize=True),
    "SGD": SGD,
    "SGD momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9, nesterov=True),
}


FAST = ("AdamW", "SGD momentum")


@pytest.mark.parametrize("tied", [pytest.param(None, marks=pytest.mark.slow), TiedHead, Borrower])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "kind",
    [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in MAKERS],
)
def test_an_optimizer_on_the_device_changes_no_bit(
    kind: str, is_async: bool, tied: type[nn.Module] | None, engines: Engines
) -> None:
    expected = run(engines, None, tied=tied, make_optimizer=MAKERS[kind], is_async=is_async)
    device = engines(
        make_model(tied),
        max_gpu_memory=PLENTY_AS_LIMIT,
        model_run_config=RoundPipeRunConfig(num_microbatch=3),
    )
    actual = Run(device, make_optimizer=MAKERS[kind], is_async=is_async)
    assert actual.device_state_bytes[-1] > 0
    assert not any(expected.device_state_bytes)
    assert actual.agrees_with(expected)


@pytest.mark.parametrize("kind", [Lion, torch.optim.AdamW], ids=["Lion", "torch's AdamW"])
def test_an_optimizer_without_a_rule_for_devices_stays_on_the_host(
    kind: Callable[..., torch.optim.Optimizer], engines: Engines
) -> None:
    actual = run(engines, PLENTY, make_optimizer=kind, is_async=False)
    assert not any(actual.device_state_bytes)


def read_a_master(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][3].norm()


def save_the_state(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.synchronize()
    torch.save(optimizer.state_dict(), io.BytesIO())


def load_the_state(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.synchronize()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def forget_the_state(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.synchronize()
    optimizer.state.clear()


def halve_moments(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.synchronize()
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def load_weights(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.load_state_dict({name: value * 1.01 for name, value in engine.state_dict().items()})


def write_weights(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.synchronize()
    for parameter in engine.model.parameters():
        parameter.data.mul_(1.01)  # without a trace in the parameter's count of writes
    engine.reload_parameters()


def evaluate(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        engine(torch.ones(ROWS, WIDTH))


def accumulate(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """One more call before the next step."""
    engine.forward_backward((torch.ones(ROWS, WIDTH),), loss_fn=lambda out, _: out.square().sum())


def drop_gradients(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    accumulate(engine, optimizer)
    engine.zero_grad()


def freeze_one(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.synchronize()
    list(engine.model.parameters())[4].requires_grad_(False)


def autograd(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine(torch.ones(ROWS, WIDTH)).square().sum().backward()


TOUCHES = (
    read_a_master,
    save_the_state,
    load_the_state,
    forget_the_state,
    halve_moments,
    load_weights,
    write_weights,
    evaluate,
    accumulate,
    drop_gradients,
    freeze_one,
    autograd,
)


@pytest.mark.parametrize("tied", [pytest.param(None, marks=pytest.mark.slow), TiedHead])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("touch", TOUCHES, ids=lambda touch: touch.__name__)
def test_whoever_looks_or_writes_finds_everything_on_the_host(
    touch: Touch, is_async: bool, tied: type[nn.Module] | None, engines: Engines
) -> None:
    expected = run(engines, None, tied=tied, is_async=is_async, touch=touch)
    actual = run(engines, PLENTY, tied=tied, is_async=is_async, touch=touch)
    assert max(actual.device_state_bytes) > 0
    assert actual.agrees_with(expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_evaluation_sees_weights_that_were_swapped_without_a_trace(
    is_async: bool, engines: Engines
) -> None:
    """As averages of weights are: through ``.data``, for the time of an evaluation."""

    def losses(room: float | None) -> list[Tensor]:
        found: list[Tensor] = []

        def swap(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
            engine.synchronize()
            kept = [parameter.detach().clone() for parameter in engine.model.parameters()]
            for parameter in engine.model.parameters():
                parameter.data.mul_(0.5)
            for _ in range(2):
                found.append(
                    engine.forward_loss(
                        (torch.ones(ROWS, WIDTH),), loss_fn=lambda out, _: out.sum()
                    )
                )
            for parameter, own in zip(engine.model.parameters(), kept, strict=True):
                parameter.data.copy_(own)
            found.append(
                engine.forward_loss((torch.ones(ROWS, WIDTH),), loss_fn=lambda out, _: out.sum())
            )

        done = run(engines, room, is_async=is_async, touch=swap, every_step=True)
        assert (done.device_state_bytes[-1] > 0) == (room is not None)
        return found + done.results

    expected = losses(None)
    assert not torch.equal(expected[0], expected[2])
    assert all(map(torch.equal, losses(PLENTY), expected))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_layer_whose_state_is_read_after_every_step_goes_back_to_the_host(
    is_async: bool, engines: Engines
) -> None:
    def read_first(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        engine.synchronize()
        optimizer.param_groups[0]["params"][0].norm()

    expected = run(engines, None, is_async=is_async, touch=read_first, every_step=True)
    actual = run(engines, PLENTY, is_async=is_async, touch=read_first, every_step=True)
    assert 0 < actual.device_state_bytes[-1] < max(actual.device_state_bytes)
    assert actual.agrees_with(expected)


@pytest.mark.parametrize("tied", [pytest.param(None, marks=pytest.mark.slow), TiedHead])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_device_states_give_way_to_what_a_call_needs(
    is_async: bool, tied: type[nn.Module] | None, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And every call goes on to compute with the weights that it would have computed with."""
    calls: list[None] = []

    def second_buffer_bytes(*_: Any) -> float:
        calls.append(None)
        return PLENTY if len(calls) < STEPS // 2 else 9e3

    monkeypatch.setattr(FreeMemory, "left_bytes", second_buffer_bytes)
    expected = run(engines, None, tied=tied, is_async=is_async, touch=wait, every_step=True)
    assert not expected.device_state_bytes[-1] > 9e3
    calls.clear()
    with_all = run(engines, PLENTY, tied=tied, is_async=is_async, touch=wait, every_step=True)
    assert max(with_all.device_state_bytes) > 9e3 >= with_all.device_state_bytes[-1]
    monkeypatch.undo()
    assert with_all.agrees_with(
        run(engines, None, tied=tied, is_async=is_async, touch=wait, every_step=True)
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_no_wait_is_missing(seed: int, is_async: bool, engines: Engines) -> None:
    def train(devices: Any) -> Run:
        engine = engines(make_model(TiedHead), devices)
        return Run(engine, is_async=is_async, touch=read_a_master)

    devices = Adversaries(1, seed, num_bytes=PLENTY)
    actual = train(devices)
    assert not devices.faults
    assert actual.device_state_bytes[-1] > 0
    assert actual.agrees_with(train(ONE))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("slice_bytes", [100, pytest.param(1 << 16, marks=pytest.mark.slow)])
def test_state_passes_through_slices_of_any_size(
    slice_bytes: int, is_async: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways, and weights on the way back, on a device that copies late."""
    monkeypatch.setattr("roundpipe.memory.copier.SLICE_BYTES", slice_bytes)
    model = nn.Sequential(*make_model(), AddsNothing())
    expected = Run(engines(copy.deepcopy(model)), is_async=is_async, touch=save_the_state)
    devices = Adversaries(1, num_bytes=PLENTY)
    actual = Run(engines(model, devices, pin_model="off"), is_async=is_async, touch=save_the_state)
    assert not devices.faults
    assert actual.device_state_bytes[-1] > 0
    assert actual.agrees_with(expected)


def test_slices_are_there_while_layers_have_device_states(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    Limits(monkeypatch, worth_from=3, none_from=6)
    engine = engines(make_model())
    held: list[int] = []

    def count(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        wait(engine, optimizer)
        link = engine._host.device_states._link
        assert link is not None
        held.append(len(link.copies._slices))

    done = Run(engine, is_async=False, touch=count, every_step=True)
    assert [num_bytes > 0 for num_bytes in done.device_state_bytes] == [
        num_slices > 0 for num_slices in held
    ]
    assert max(held) == NUM_SLICES
    assert held[0] == held[-1] == 0


def test_an_optimizer_state_can_be_used_when_the_engine_is_closed(engines: Engines) -> None:
    engine = engines(make_model(), max_gpu_memory=PLENTY_AS_LIMIT)
    done = Run(engine, is_async=False)
    assert done.device_state_bytes[-1] > 0
    assert engine.statistics()["device_state_bytes"] == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_checkpoint_has_what_is_on_the_device(
    is_async: bool, engines: Engines, tmp_path: Path
) -> None:
    def save_and_load(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        roundpipe.save_checkpoint(tmp_path / "state", engine, optimizer)
        with torch.no_grad():
            for master in engine.optim_parameters():
                master.zero_()
        roundpipe.load_checkpoint(tmp_path / "state", engine, optimizer)

    expected = run(engines, None, is_async=is_async, touch=save_and_load)
    actual = run(engines, PLENTY, is_async=is_async, touch=save_and_load)
    assert max(actual.device_state_bytes) > 0
    assert actual.agrees_with(expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_step_that_fails_loses_nothing(is_async: bool, engines: Engines) -> None:
    """Its update is computed and not written back, wherever the state is; the next step writes
    back."""

    def fail(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        def step() -> None:
            optimizer.step()
            raise ValueError("no")

        accumulate(engine, optimizer)
        with pytest.raises(ValueError, match="no"):  # noqa: PT012 - which of the two raises depends on the mode
            engine.step(step, is_async=is_async)
            engine.synchronize()

    expected = run(engines, None, is_async=is_async, touch=fail)
    assert run(engines, PLENTY, is_async=is_async, touch=fail).agrees_with(expected)


def test_after_running_out_of_memory_no_layer_has_a_device_state(engines: Engines) -> None:
    def run_out(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        def loss_fn(out: Tensor, _: Any) -> Tensor:
            raise torch.OutOfMemoryError("injected")

        assert engine.statistics()["device_state_bytes"] > 0
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            engine.forward_backward((torch.ones(ROWS, WIDTH),), loss_fn=loss_fn)

    actual = run(engines, PLENTY, is_async=False, touch=run_out)
    assert actual.device_state_bytes[-1] == 0
    assert actual.agrees_with(run(engines, None, is_async=False))


def test_running_out_of_memory_before_there_are_device_states_keeps_none_away(
    engines: Engines,
) -> None:
    """It was not they that took the memory; a call that is made again is no reason to train slowly
    for good."""
    engine = engines(make_model(), max_gpu_memory=PLENTY_AS_LIMIT)
    optimizer = SGD(engine.optim_parameters(), lr=1e-2)
    times: list[int] = []

    def total(out: Tensor, _: Any) -> Tensor:
        times.append(1)
        if len(times) == 1:
            raise torch.OutOfMemoryError("injected")
        return out.square().sum()

    for _ in range(5):
        engine.forward_backward((torch.ones(ROWS, WIDTH),), loss_fn=total)
        engine.step(optimizer.step, is_async=False)
    assert engine.statistics()["device_state_bytes"] > 0


def test_several_devices_have_no_device_states(engines: Engines) -> None:
    engine = engines(make_model(), TWO, max_gpu_memory=PLENTY_AS_LIMIT)
    assert not any(Run(engine, is_async=False).device_state_bytes)


def test_a_device_without_room_for_a_device_state_is_no_error(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was thought free is not."""
    empty = torch.empty

    def full(*args: Any, **kwargs: Any) -> Tensor:
        is_for_a_device_state = Path(sys._getframe(1).f_code.co_filename).stem == "device_state"
        if is_for_a_device_state and kwargs["dtype"] is torch.float32:
            raise torch.OutOfMemoryError("full")
        return empty(*args, **kwargs)

    monkeypatch.setattr("roundpipe.params.placement.device_state.torch.empty", full)
    actual = run(engines, PLENTY, is_async=False)
    monkeypatch.undo()
    assert actual.device_state_bytes[-1] == 0
    assert actual.agrees_with(run(engines, None, is_async=False))


@pytest.mark.parametrize("devices", [ONE], ids=str)
def test_an_asynchronous_update_that_nobody_waits_for_stays_on_the_host(
    devices: DeviceSet, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "hides_update", lambda *_: True)
    assert not any(run(engines, PLENTY, is_async=True).device_state_bytes)


def test_a_limit_that_is_not_sure_takes_nothing_for_good() -> None:
    layer = LayerParameters(0, (), 0, 0)
    store: Any = type("Store", (), {"device_states": {}, "layers": (layer,)})()
    device_states = DeviceStates(store, VirtualDevice(0), PAGEABLE)
    device_states.let(100.0, is_sure=False, is_worth_it=True)
    assert not device_states.has_room
    device_states.let(100.0, is_sure=True, is_worth_it=True)
    assert device_states.has_room
    device_states.let(0.0, is_sure=False, is_worth_it=True)
    assert not device_states.has_room
    device_states.let(200.0, is_sure=True, is_worth_it=False)
    assert not device_states.has_room
    device_states.let(200.0, is_sure=True, is_worth_it=True)
    assert device_states.has_room


def wait(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """For the optimizer thread, without a flush."""
    with roundpipe.OptimizerCtx():
        pass


class Limits:
    """What calls leave of the device, by the number of the call, and from which on more device
    states are worth it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, worth_from: int, none_from: int) -> None:
        self.num_calls = 0

        def second_buffer_bytes(*_: Any) -> float:
            self.num_calls += 1
            return PLENTY if self.num_calls < none_from else 0.0

        monkeypatch.setattr(FreeMemory, "left_bytes", second_buffer_bytes)
        monkeypatch.setattr(Planner, "hides_update", lambda *_: self.num_calls < worth_from)


def test_a_layer_that_leaves_at_once_is_computed_with_the_copy_that_it_had(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights of the version before the device state may lie in the second working copy."""
    monkeypatch.setattr("roundpipe.step.write_back.SPARED_BYTES", 0)
    expected = run(engines, None, is_async=True, touch=wait, every_step=True)
    Limits(monkeypatch, worth_from=3, none_from=4)
    actual = run(engines, PLENTY, is_async=True, touch=wait, every_step=True)
    assert actual.device_state_bytes[2] > 0 == actual.device_state_bytes[3]
    assert actual.agrees_with(expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_memory_of_device_states_comes_back_without_a_collection(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = VirtualDevice(0, num_bytes=PLENTY)
    capacity = device.capacity
    assert capacity is not None
    Limits(monkeypatch, worth_from=0, none_from=6)
    gc.collect()
    gc.disable()
    try:
        with RoundPipe(make_model(TiedHead), devices=[device]) as engine:
            optimizer = AdamW(engine.optim_parameters(), lr=1e-2)
            used, held = [], []
            for _ in range(6):
                engine.forward_backward(
                    (torch.ones(ROWS, WIDTH),), loss_fn=lambda out, _: out.square().sum()
                )
                engine.step(optimizer.step, is_async=is_async)
                engine.synchronize()
                used.append(capacity.used)
                held.append(engine._host.device_bytes()[device.name])  # type: ignore[index]
        assert used[4] > 2 * used[0]
        assert used[4:] == held[4:]
        assert capacity.used == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("tied", [pytest.param(None, marks=pytest.mark.slow), TiedHead])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_images", [0, 1, 5, 7])
def test_a_device_without_room_for_an_image_is_no_error(
    num_images: int,
    is_async: bool,
    tied: type[nn.Module] | None,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_image, added = DeviceState.add_image, [0]

    def full(device_state: DeviceState) -> None:
        added[0] += 1
        if added[0] > num_images:
            raise torch.OutOfMemoryError("full")
        add_image(device_state)

    monkeypatch.setattr(DeviceState, "add_image", full)
    actual = run(engines, PLENTY, tied=tied, is_async=is_async)
    assert added[0] > num_images or not is_async
    assert actual.agrees_with(run(engines, None, tied=tied, is_async=is_async))


class FailsInBackward(nn.Module):
    """Runs out of memory in the backward of a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden)
        if output.requires_grad and output.shape[0] == 1:
            output.register_hook(_run_out)
        return output


def _run_out(_: Tensor) -> None:
    raise torch.OutOfMemoryError("injected")


@pytest.mark.parametrize("is_late", [False, True], ids=["autograd", "late"])
def test_running_out_of_memory_in_a_backward_ends_device_states_too(
    is_late: bool, engines: Engines
) -> None:
    model = nn.Sequential(FailsInBackward(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plan = ModelExecutePlan(fwd_plan=[range(1)], bwd_plan=[range(1, 3), range(1)])
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    engine = engines(model, max_gpu_memory=PLENTY_AS_LIMIT)
    optimizer = SGD(engine.optim_parameters(), lr=1e-2)

    def total(out: Tensor, _: Any) -> Tensor:
        return out.square().sum()

    for _ in range(4):
        engine.forward_backward((torch.ones(ROWS, WIDTH),), loss_fn=total, run_config=config)
        engine.step(optimizer.step, is_async=False)
    assert engine.statistics()["device_state_bytes"] > 0
    with pytest.raises(torch.OutOfMemoryError, match="injected"):  # noqa: PT012 - a late one is raised by the next call
        if is_late:
            engine.forward_backward((torch.ones(1, WIDTH),), loss_fn=total, run_config=config)
            engine.synchronize()
        else:
            engine(
                torch.ones(1, WIDTH), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)
            ).sum().backward()
    engine.forward_backward((torch.ones(ROWS, WIDTH),), loss_fn=total, run_config=config)
    assert engine.statistics()["device_state_bytes"] == 0


class Rewrites(nn.Module):
    """Writes to its weight what it holds, in each forward, as some adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(1.0)
        output: Tensor = self.linear(hidden)
        return output


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_layer_that_writes_to_its_weights_has_no_device_state(
    is_async: bool, engines: Engines
) -> None:
    def train(max_gpu_memory: str | None) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Rewrites())
        engine = engines(
            model,
            max_gpu_memory=max_gpu_memory,
            model_run_config=RoundPipeRunConfig(num_microbatch=1),
        )
        return Run(engine, is_async=is_async, touch=accumulate, every_step=True)

    expected, actual = train(None), train(PLENTY_AS_LIMIT)
    assert actual.device_state_bytes[-1] > 0
    assert actual.agrees_with(expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_interrupt_while_device_states_are_left_waits_until_they_are(
    is_async: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up = DeviceStates.give_up
    caught: list[None] = []
    left: list[None] = []

    def interrupted(device_states: DeviceStates, group: Any) -> None:
        """Behind the first layer that was brought home; once, because a second interrupt does not
        wait."""
        left.append(None)
        if len(left) == 1:
            signal.raise_signal(signal.SIGINT)
        give_up(device_states, group)

    expected = run(engines, None, is_async=is_async, touch=wait, every_step=True)
    Limits(monkeypatch, worth_from=0, none_from=4)
    monkeypatch.setattr(DeviceStates, "give_up", interrupted)
    forward_backward = RoundPipe.forward_backward

    def again(engine: RoundPipe, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward_backward(engine, *args, **kwargs)
        except KeyboardInterrupt:
            caught.append(None)
            return forward_backward(engine, *args, **kwargs)

    monkeypatch.setattr(RoundPipe, "forward_backward", again)
    actual = run(engines, PLENTY, is_async=is_async, touch=wait, every_step=True)
    assert caught
    assert actual.agrees_with(expected)


def test_an_interrupt_while_values_are_fetched_leaves_each_readable(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        """After the master was let go of, which is written then, and before its moments are."""
        engine.synchronize()  # because what an update is still to write is held too
        master = engine.optim_parameters()[0]
        freed: list[Any] = []

        def free_one(tensor: Any) -> None:
            if freed:
                raise KeyboardInterrupt
            freed.append(tensor)
            free(tensor)

        with monkeypatch.context() as patched:
            patched.setattr("roundpipe.params.placement.device_state.free", free_one)
            if any(type(state) is not Tensor for state in optimizer.state[master].values()):
                with pytest.raises(KeyboardInterrupt):
                    master.norm()
        with torch.no_grad():
            master.mul_(1.5)
        optimizer.state[master]["exp_avg"].norm()

    expected = run(engines, None, is_async=False, touch=interrupted)
    actual = run(engines, PLENTY, is_async=False, touch=interrupted)
    assert max(actual.device_state_bytes) > 0
    assert actual.agrees_with(expected)


def places_in(look: Callable[[], Any]) -> int:
    places = Places(FETCHING)
    with places.watched():
        look()
    return places.count


@pytest.mark.slow
@pytest.mark.parametrize("slice_bytes", [100, 1 << 20])
def test_an_interrupt_anywhere_while_values_are_fetched_loses_none(
    slice_bytes: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks again finds the newest values, also of what he has not written to since."""
    monkeypatch.setattr("roundpipe.memory.copier.SLICE_BYTES", slice_bytes)
    num_interrupted = 0

    def train(limit: str | None) -> Iterator[tuple[list[Tensor], Callable[[], Any]]]:
        """After every fourth step: a master and its moments, and how to look at them."""
        generator = torch.Generator().manual_seed(1)
        engine = engines(make_model(), max_gpu_memory=limit)
        optimizer = AdamW(engine.optim_parameters(), lr=1e-2)
        while True:
            for _ in range(4):  # with fewer the layer would go back to the host for good
                x = torch.randn(ROWS, WIDTH, generator=generator)
                engine.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
                engine.step(optimizer.step, is_async=False)
            engine.synchronize()
            master = engine.optim_parameters()[0]
            state = [
                value for value in optimizer.state[master].values() if isinstance(value, Tensor)
            ]
            yield [master, *state], master.norm

    pairs = zip(train(PLENTY_AS_LIMIT), train(None), strict=True)
    place, last = 0, 1
    for (found, look), (expected, _) in pairs:
        assert any(isinstance(tensor, Held) for tensor in found)
        if place == 0:
            last = places_in(look)
        else:
            try:
                with Places(FETCHING, place).watched():
                    look()
            except KeyboardInterrupt:
                num_interrupted += 1
        held = [isinstance(tensor, Held) for tensor in found]
        assert all(map(torch.equal, found, expected)), (
            f"interrupted at place {place} of {last}, held: {held}"
        )
        place += max(1, last // 60)
        if place > last:
            break
    assert num_interrupted > 20


@pytest.mark.parametrize("tied", [None, TiedHead])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("what", ["bring_home", "fetch_all"])
@pytest.mark.parametrize("place", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_error_while_device_states_are_left_loses_no_version(
    place: int,
    what: str,
    is_async: bool,
    tied: type[nn.Module] | None,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have left or will; every call goes on to compute with what it would have computed
    with."""
    forward_backward = RoundPipe.forward_backward

    def train(room: float | None) -> Run:
        """With another step before the fourth call: where that has failed, before the device states
        are asked to leave again"""
        num_calls = itertools.count(1)

        def call(engine: RoundPipe, *args: Any, **kwargs: Any) -> Any:
            if next(num_calls) == 4:
                if room is not None:
                    with pytest.raises(ValueError, match="injected"):
                        forward_backward(engine, *args, **kwargs)
                engine.step(lambda: None, is_async=is_async)
            return forward_backward(engine, *args, **kwargs)

        monkeypatch.setattr(RoundPipe, "forward_backward", call)
        return run(engines, room, tied=tied, is_async=is_async, touch=wait, every_step=True)

    expected = train(None)
    Limits(monkeypatch, worth_from=0, none_from=4)
    fail_once(monkeypatch, what, place)
    actual = train(PLENTY)
    assert max(actual.device_state_bytes) > 0 == actual.device_state_bytes[-1]
    assert actual.agrees_with(expected)


def fail_once(monkeypatch: pytest.MonkeyPatch, what: str, place: int) -> None:
    """A method raises at its ``place``-th call while device states are left."""
    owner: type = Whereabouts if what == "bring_home" else DeviceState
    leave_devices, method, is_leaving, places = (
        WriteBack.leave_devices,
        getattr(owner, what),
        [False],
        itertools.count(),
    )

    def leave(write_back: WriteBack, version: int) -> None:
        is_leaving[0] = True
        try:
            leave_devices(write_back, version)
        finally:
            is_leaving[0] = False

    def failing(self: Any, *args: Any) -> Any:
        if is_leaving[0] and next(places) == place:
            raise ValueError("injected")
        return method(self, *args)

    monkeypatch.setattr(WriteBack, "leave_devices", leave)
    monkeypatch.setattr(owner, what, failing)


def test_state_comes_home_also_if_a_worker_does_not_end_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = WorkerPool.close

    def failing(worker_pool: WorkerPool) -> None:
        close(worker_pool)
        raise ValueError("injected")

    engine = RoundPipe(make_model(), max_gpu_memory=PLENTY_AS_LIMIT)
    optimizer = AdamW(engine.optim_parameters(), lr=1e-2)
    for _ in range(4):
        accumulate(engine, optimizer)
        engine.step(optimizer.step, is_async=False)
    assert engine.statistics()["device_state_bytes"] > 0
    monkeypatch.setattr(WorkerPool, "close", failing)
    with pytest.raises(ValueError, match="injected"):
        engine.close()
    assert engine.statistics()["device_state_bytes"] == 0
    assert not any(isinstance(master, Held) for master in engine.optim_parameters())


def test_beside_an_asynchronous_update_layers_with_device_states_go_first_and_shallow_first(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call after the next waits for them in this order. The others leave memory on the host to
    gradients, which come deep first. Room that comes in the middle is for the next update, in which
    shallow layers may have it."""
    marked: list[int] = []
    mark, write = WriteBack._mark, WriteBack._write

    def listening(self: WriteBack, layers: Iterable[int], version: int) -> None:
        marked.extend(layers := list(layers))
        mark(self, layers, version)

    def with_more_room(*args: Any, **kwargs: Any) -> list[int]:
        device_states.let(PLENTY, is_sure=True, is_worth_it=True)
        return write(*args, **kwargs)

    engine = engines(make_model())
    optimizer, device_states = AdamW(engine.optim_parameters(), lr=1e-2), engine._host.device_states
    for _ in range(2):
        accumulate(engine, optimizer)
        engine.step(optimizer.step)
        engine.synchronize()
    room = engine._runner.memory.free
    room.let_device_states = lambda _: None  # type: ignore[attr-defined, method-assign]
    accumulate(engine, optimizer)
    engine._steps.wait_idle()
    device_states._most = PLENTY
    layer = engine._store.layers[0]
    (state,) = state_bytes([layer.num_bytes], 12 * layer.num_elements, 4 * layer.num_elements)
    device_states._limit = 2 * state
    monkeypatch.setattr("roundpipe.step.write_back._TOGETHER_BYTES", 1)
    monkeypatch.setattr(WriteBack, "_mark", listening)
    monkeypatch.setattr(WriteBack, "_write", with_more_room)
    engine.step(optimizer.step)
    engine._steps.wait_idle()
    assert marked == [0, 1, 3, 2]
    assert sorted(engine._store.device_states) == [0, 1]
    accumulate(engine, optimizer)
    marked.clear()
    engine.step(optimizer.step)
    engine._steps.wait_idle()
    assert marked == [0, 1, 2, 3]
