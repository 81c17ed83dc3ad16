"""On the adversarial device a missing wait fails every time, whatever the seed; with all waits
nothing changes.

First its rules, one by one, on a bare lane; then every wait of the engine is taken out, one by one.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.testing.adversarial import AdversarialDevice
from roundpipe.testing.lanes import AdversarialEvent, AdversarialLane
from roundpipe.testing.ordering import poison
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import Tensors

SEEDS = range(3)
ALL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@pytest.fixture(params=SEEDS)
def device(request: pytest.FixtureRequest) -> AdversarialDevice:
    return AdversarialDevice(0, seed=request.param)


def is_poison(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_poison_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    for tensor in (
        torch.zeros(4, 3, dtype=dtype),
        torch.zeros(3, 4, dtype=dtype).T,
        torch.zeros((), dtype=dtype),
    ):
        poison(tensor)
        assert tensor.isnan().all() if dtype.is_floating_point else (tensor != 0).all()
    poison(torch.empty(0, dtype=dtype))


# The rules of [Note: the adversary].


@pytest.mark.parametrize("waits", ["host", "lane", "other lane's event"])
def test_a_copy_happens_when_somebody_waits_for_it(waits: str, device: AdversarialDevice) -> None:
    """[1] Neither recording an event nor later work elsewhere is enough."""
    source, target = torch.arange(6.0), torch.zeros(6)
    device.up.copy_(target, source)
    event = device.up.record()
    assert is_poison(target)
    with device.compute.work():
        assert is_poison(target + 1)
    if waits == "host":
        event.wait()
    elif waits == "lane":
        device.compute.wait(event)
        assert is_poison(target), "queueing a wait is not waiting"
        with device.compute.work():
            torch.zeros(1).add_(1)
    else:
        device.down.wait(event)
        device.down.record().wait()
    assert torch.equal(target, source)
    assert not device.faults


def test_an_event_covers_what_was_queued_before_it_only(device: AdversarialDevice) -> None:
    """[1]"""
    source, first, second = torch.ones(3), torch.zeros(3), torch.zeros(3)
    device.up.copy_(first, source)
    event = device.up.record()
    device.up.copy_(second, source)
    event.wait()
    assert torch.equal(first, source)
    assert is_poison(second)
    device.up.record().wait()
    assert torch.equal(second, source)


def test_copies_of_one_lane_keep_their_order(device: AdversarialDevice) -> None:
    """A copy may read what the one before it writes."""
    source, middle, end = torch.ones(3), torch.zeros(3), torch.zeros(3)
    device.up.copy_(middle, source)
    device.up.copy_(end, middle)
    device.up.record().wait()
    assert torch.equal(end, source)
    assert not device.faults


def test_a_source_written_during_the_copy_gives_poison(device: AdversarialDevice) -> None:
    """[2]"""
    source, target = torch.ones(3), torch.zeros(3)
    device.up.copy_(target, source)
    source[1] = 2.0
    device.up.record().wait()
    assert is_poison(target)
    assert "written while" in device.faults[0]


def test_a_source_may_be_written_after_the_copy(device: AdversarialDevice) -> None:
    """[2]"""
    source, target = torch.ones(3), torch.zeros(3)
    device.up.copy_(target, source)
    device.up.record().wait()
    source[1] = 2.0
    device.up.record().wait()
    assert torch.equal(target, torch.ones(3))
    assert not device.faults


@pytest.mark.parametrize("waits", [False, True])
def test_a_copy_of_what_a_lane_made_must_wait_for_that_lane(
    waits: bool, device: AdversarialDevice
) -> None:
    """[3]"""
    target = torch.zeros(3)
    with device.compute.work():
        source = torch.ones(3) * 2
    if waits:
        device.down.wait(device.compute.record())
    device.down.copy_(target, source)
    device.down.record().wait()
    assert torch.equal(target, torch.full((3,), 2.0)) is waits
    assert bool(device.faults) is not waits


def test_an_event_recorded_too_early_does_not_help(device: AdversarialDevice) -> None:
    """[3]"""
    target, source = torch.zeros(3), torch.zeros(3)
    device.down.wait(device.compute.record())
    with device.compute.work():
        source.add_(1)
    device.down.copy_(target, source)
    device.down.record().wait()
    assert is_poison(target)


def test_waits_carry_over_lanes(device: AdversarialDevice) -> None:
    """[3] compute -> up -> down orders compute before down."""
    target = torch.zeros(3)
    with device.compute.work():
        source = torch.ones(3) * 2
    device.up.wait(device.compute.record())
    device.down.wait(device.up.record())
    device.down.copy_(target, source)
    device.down.record().wait()
    assert torch.equal(target, source)


@pytest.mark.parametrize("waits", [False, True])
def test_a_target_must_not_be_in_use(waits: bool, device: AdversarialDevice) -> None:
    """[3] A slot that the compute lane may still read."""
    with device.up.work():
        slot = torch.empty(3)
    device.up.copy_(slot, torch.ones(3))
    device.compute.wait(device.up.record())
    with device.compute.work():
        assert float(slot.sum()) == 3
    if waits:
        device.up.wait(device.compute.record())
    device.up.copy_(slot, torch.full((3,), 2.0))
    device.up.record().wait()
    assert is_poison(slot) is not waits


@pytest.mark.parametrize("lends", [False, True])
def test_memory_freed_during_the_copy_must_have_been_lent(
    lends: bool, device: AdversarialDevice
) -> None:
    """[4]"""
    target = torch.zeros(3)
    with device.compute.work():
        source = torch.ones(3) * 2
    device.down.wait(device.compute.record())
    device.down.copy_(target, source)
    if lends:
        device.down.borrow(source)
    del source
    device.down.record().wait()
    assert is_poison(target) is not lends


def test_a_tensor_is_on_one_device_only() -> None:
    """[5] On another it arrives as a copy, late."""
    here, there = (AdversarialDevice(index) for index in range(2))
    with here.compute.work():
        tensor = torch.ones(3) * 2
    assert here.holds(tensor)
    assert not there.holds(tensor)
    there.up.wait(here.compute.record())
    with there.up.work():
        moved = tensor.to(there.torch_device)
    assert moved.data_ptr() != tensor.data_ptr()
    assert is_poison(moved)
    there.up.record().wait()
    assert torch.equal(moved, tensor)


def test_memory_made_on_a_lane_starts_poisoned(device: AdversarialDevice) -> None:
    with device.up.work():
        assert is_poison(torch.empty(5))


def test_the_caller_must_wait_for_what_it_is_lent(device: AdversarialDevice) -> None:
    with device.compute.work():
        good, bad = torch.ones(3) * 2, torch.ones(3) * 2
    early = device.compute.record()
    with device.compute.work():
        bad.add_(1)
    early.wait()
    device.lend_to_caller(good)
    device.lend_to_caller(bad)
    assert torch.equal(good, torch.full((3,), 2.0))
    assert is_poison(bad)


def test_what_a_device_that_is_gone_has_queued_is_forgotten() -> None:
    """It will never be done, so it keeps neither the device nor the memory that it would copy."""
    device = AdversarialDevice(0)
    device.up.copy_(torch.zeros(3), torch.ones(3))
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None


def test_the_seed_decides_the_order_of_copies_that_have_none() -> None:
    def order(seed: int) -> list[int]:
        device = AdversarialDevice(0, seed=seed)
        targets = [torch.zeros(1) for _ in range(4)]
        lanes = [device.up, device.down]
        for number, target in enumerate(targets):
            lanes[number % 2].copy_(target, torch.ones(1))
        for lane in lanes:
            device.compute.wait(lane.record())
        seen: list[int] = []
        for lane in lanes:
            finish = lane.finish_first

            def watched(finish: Callable[[], None] = finish) -> None:
                finish()
                seen.extend(n for n, t in enumerate(targets) if not is_poison(t) and n not in seen)

            lane.finish_first = watched  # type: ignore[method-assign]
        device.compute.record().wait()
        return seen

    orders = {tuple(order(seed)) for seed in range(20)}
    assert len(orders) >= 3
    assert all(
        sorted(o) == [0, 1, 2, 3] and o.index(0) < o.index(2) and o.index(1) < o.index(3)
        for o in orders
    )
    assert order(5) == order(5)


# The engine, whole and with a wait taken out.

PLAN = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 6), range(2, 4), range(2)]
)
BATCH = mlp_batch(rows=6)


def make_model() -> nn.Sequential:
    """Every layer has parameters of one size, so that slots are taken again within a call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(5)), nn.BatchNorm1d(MLP_WIDTH)
    )


class Result(dict[str, Tensor]):
    """Loss, outputs, gradients, weights and buffers after some calls and steps."""

    def agrees_with(self, other: "Result") -> bool:
        return self.keys() == other.keys() and all(
            torch.equal(value, other[name]) for name, value in self.items()
        )


def train(engine: RoundPipe) -> Result:
    result = Result()
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.01)
    for number in range(3):
        result[f"loss {number}"] = run_batch(engine, BATCH, 3, execute_plan=PLAN)
        engine.step(optimizer.step, is_async=number != 1)
    run_batch(engine, BATCH, 3, execute_plan=PLAN)
    parts: list[tuple[str, Tensors]] = [
        ("gradient", engine_gradients(engine)),
        ("weight", engine_weights(engine)),
    ]
    for kind, tensors in parts:
        result.update({f"{kind} {name}": tensor for name, tensor in tensors.items()})
    result["output"] = engine(
        *BATCH.args, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3)
    ).detach()
    result.update({name: buffer.clone() for name, buffer in engine.model.named_buffers()})
    return result


@pytest.fixture(scope="module")
def expected() -> Result:
    with RoundPipe(make_model(), devices=1) as engine:
        return train(engine)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_all_its_waits_the_engine_gives_the_same(
    count: int, seed: int, expected: Result, engines: Engines
) -> None:
    devices = Adversaries(count, seed)
    result = train(engines(make_model(), devices))  # type: ignore[arg-type]
    assert not devices.faults
    assert result.agrees_with(expected)


class Removal(NamedTuple):
    """Calls that a part of the engine makes, no longer made: all on lanes (or on events of lanes)
    of some kinds."""

    method: Callable[..., Any]
    files: tuple[str, ...]
    lanes: tuple[str, ...] = ("compute", "up", "down")

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Returns a list that grows with every call left out."""
        owner = AdversarialEvent if self.method is AdversarialEvent.wait else AdversarialLane
        left_out: list[str] = []

        def filtered(it: Any, *args: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename).stem
            kind = it.kind if isinstance(it, AdversarialLane) else it.lane.kind
            if caller in self.files and kind in self.lanes:
                left_out.append(caller)
                return None
            return self.method(it, *args)

        monkeypatch.setattr(owner, self.method.__name__, filtered)
        return left_out


ANY, ALONE, SEVERAL = (1, 2, 3), (1,), (2, 3)
REMOVALS = {
    # With more devices, the boundaries that come up after the weights bring the same order with
    # them.
    "an upload waits until the slot is free": (
        Removal(AdversarialLane.wait, ("loader",), ("up",)),
        ALONE,
    ),
    "a layer waits for its weights": (
        Removal(AdversarialLane.wait, ("sender",), ("compute",)),
        ALONE,
    ),
    "a layer waits for its input": (
        Removal(AdversarialLane.wait, ("boundaries",), ("compute",)),
        ANY,
    ),
    "a boundary is sent when it is made": (
        Removal(AdversarialLane.wait, ("boundaries",), ("up", "down")),
        SEVERAL,
    ),
    "a boundary is kept until it is sent": (
        Removal(AdversarialLane.borrow, ("boundaries",), ("down",)),
        SEVERAL,
    ),
    "gradients offload when they are summed": (Removal(AdversarialLane.wait, ("gradients",)), ANY),
    "sums are kept until they have offloaded": (
        Removal(AdversarialLane.borrow, ("gradients",)),
        ANY,
    ),
    "the optimizer waits for gradients": (
        Removal(AdversarialEvent.wait, ("call",), ("down",)),
        ANY,
    ),
    # Whoever waits for one of them has waited for the other.
    "the caller waits for outputs and buffers": (
        Removal(AdversarialEvent.wait, ("boundaries", "batches", "changes")),
        ANY,
    ),
}
CASES = [
    pytest.param(removal, count, id=f"{name}-{count}")
    for name, (removal, counts) in REMOVALS.items()
    for count in counts
]


@pytest.mark.parametrize(("removal", "count"), CASES)
def test_without_one_of_its_waits_the_engine_gives_wrong_numbers_every_time(
    removal: Removal,
    count: int,
    expected: Result,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name of the case is the rule that is broken."""
    left_out = removal.apply(monkeypatch)
    for seed in SEEDS:
        result = train(engines(make_model(), Adversaries(count, seed)))  # type: ignore[arg-type]
        assert left_out, "the wait is not where this test looks for it"
        assert not result.agrees_with(expected), f"seed {seed}"
        assert any(value.isnan().any() for value in result.values()), f"seed {seed}"


class Nested(nn.Module):
    """Runs backward inside its own backward, twice: each time gradients for all its parameters
    arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(2):
            hidden = checkpoint(self.linear, hidden, use_reentrant=True)
        return hidden


@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_that_come_after_a_layer_seemed_complete(count: int, engines: Engines) -> None:
    """What was sent down too early is taken back; its memory must not be let go while the copy is
    under way."""

    def linear() -> nn.Linear:
        return nn.Linear(MLP_WIDTH, MLP_WIDTH)

    models = [nn.Sequential(linear(), *(Nested() for _ in range(4)), linear()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    devices = Adversaries(count)
    engine, plain = engines(models[0], devices), engines(models[1], ONE)  # type: ignore[arg-type]
    for _ in range(3):
        for one in (engine, plain):
            run_batch(one, BATCH, 3, execute_plan=PLAN)
        ONE.check(engine_gradients(engine), engine_gradients(plain))
    # Writing to sums on their way down is harmless here, because what arrives is not used.
    assert [fault for fault in devices.faults if "was written while" not in fault] == []


def test_the_plain_virtual_device_would_not_have_noticed(
    expected: Result, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the adversary is for."""
    devices = ONE
    engine = engines(make_model(), devices)
    lane = type(engine.devices[0].up)
    monkeypatch.setattr(lane, "wait", lambda self, event: None)
    assert train(engine).agrees_with(expected)
