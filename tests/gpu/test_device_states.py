"""Optimizer state on a real device: torch's numbers, and memory that comes back."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, clip_grad_norm_
from roundpipe.autoplan.planner import Planner
from roundpipe.device.accelerator import AcceleratorDevice
from roundpipe.memory.copier import Pair, PinnedCopier
from roundpipe.memory.pinning import HostMemory
from roundpipe.memory.ring import NUM_SLICES, SLICE_BYTES
from roundpipe.optim import SGD, Adam, AdamW
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines

pytestmark = pytest.mark.gpu
CUDA = DeviceSet(kind="cuda", count=1)
STEPS, WIDTH, MAX_NORM = 8, 300, 10.0
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (AdamW, torch.optim.AdamW, {}),
    "AdamW amsgrad": (AdamW, torch.optim.AdamW, {"amsgrad": True}),
    "Adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    "SGD": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}


@pytest.fixture(autouse=True)
def _device_states_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "hides_update", lambda *_: False)


def make_model() -> nn.Sequential:
    """Its gradients do not depend on its weights, so that differences of rounding do not grow."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH))


def total(outputs: Tensor, label: Tensor) -> Tensor:
    return (outputs * label).sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(STEPS)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_on_the_device_are_torchs(kind: str, is_async: bool, engines: Engines) -> None:
    ours, theirs, settings = OPTIMIZERS[kind]
    engine, plain = engines(make_model(), CUDA), make_model()
    optimizer = ours(engine.optim_parameters(), lr=1e-2, **settings)
    reference = theirs(plain.parameters(), lr=1e-2, **settings)

    def step() -> None:
        clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    for x, label in batches():
        engine.forward_backward((x,), label=label, loss_fn=total)
        engine.step(step, is_async=is_async)
        total(plain(x), label).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        reference.step()
        reference.zero_grad()
    engine.synchronize()
    assert engine.statistics()["device_state_bytes"] > 0
    for actual, expected in zip(engine.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    for actual, expected in zip(engine.optim_parameters(), plain.parameters(), strict=True):
        assert actual.device.type == "cpu"
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def memory() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_close_gives_the_memory_back(is_async: bool) -> None:
    before = memory()
    with RoundPipe(make_model(), devices=CUDA.argument) as engine:
        optimizer = AdamW(engine.optim_parameters(), lr=1e-2)
        for x, label in batches():
            engine.forward_backward((x,), label=label, loss_fn=total)
            engine.step(optimizer.step, is_async=is_async)
        engine.synchronize()
        device_state_bytes = engine.statistics()["device_state_bytes"]
        assert memory() - before >= device_state_bytes * 3 // 4
    assert device_state_bytes > 0
    assert memory() - before < device_state_bytes // 4
    assert all(
        value.device.type == "cpu" for state in optimizer.state.values() for value in state.values()
    )


def test_state_passes_through_page_locked_slices_in_the_order_of_the_lane() -> None:
    """More than all slices hold, both ways, while the lane is kept busy; what is page-locked needs
    none."""
    device, host_memory = (
        AcceleratorDevice(torch.device("cuda", 0)),
        HostMemory("alloc", accelerated=True),
    )
    copies = PinnedCopier(device.compute, host_memory, 1 << 40)
    sizes = [NUM_SLICES * SLICE_BYTES // 2 + 3, 5, 0, SLICE_BYTES]
    hosts = [torch.randn(size) for size in sizes]
    with device.compute.work():
        theres = [torch.full((size,), 7.0, device=device.torch_device) for size in sizes]
        torch.cuda._sleep(100_000_000)
    pairs = [Pair(*pair) for pair in zip(hosts, theres, strict=True)]
    copies.up(pairs)
    assert all(arena.bytes.is_pinned() for arena in copies._slices)
    assert all(torch.equal(there.cpu(), host) for host, there in pairs)
    with device.compute.work():
        torch.cuda._sleep(100_000_000)
        for there in theres:
            there.mul_(2)
    expected = [host * 2 for host in hosts]
    copies.down(pairs)
    assert all(map(torch.equal, hosts, expected))
    copies.close()
    locked = host_memory.arena(4 * 5).tensor(0, (5,), torch.float32)
    copies.down([Pair(locked, theres[1])])
    assert torch.equal(locked, expected[1])
    assert not copies._slices
