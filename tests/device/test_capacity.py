"""A virtual device with a size counts what is on it, and refuses what does not fit."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe
from roundpipe.device.virtual import VirtualDevice
from roundpipe.testing.adversarial import AdversarialDevice
from tests.support.models import make_mlp, mlp_batch

KIB = 1024
KINDS: dict[str, Callable[[int], VirtualDevice]] = {
    "virtual": lambda num_bytes: VirtualDevice(0, num_bytes),
    "adversarial": lambda num_bytes: AdversarialDevice(0, num_bytes=num_bytes),
}
of_both_kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def used(device: VirtualDevice) -> int:
    gc.collect()
    assert device.capacity is not None
    return device.capacity.used


@of_both_kinds
def test_what_is_made_in_work_counts_until_it_is_freed(
    make: Callable[[int], VirtualDevice],
) -> None:
    device = make(64 * KIB)
    outside = torch.ones(KIB, dtype=torch.uint8)
    with device.compute.work():
        made = torch.zeros(4 * KIB, dtype=torch.uint8)
        assert used(device) == 4 * KIB
        view = made[:10]
        made += 1
        outside += 1
        assert used(device) == 4 * KIB
        pair = [made + 1, made + 2]
    assert used(device) == 12 * KIB
    del pair, made
    assert used(device) == 4 * KIB
    del view
    assert used(device) == 0


@of_both_kinds
def test_what_does_not_fit_is_refused_with_both_numbers_and_does_not_count(
    make: Callable[[int], VirtualDevice],
) -> None:
    device = make(10 * KIB)
    with device.up.work():
        made = torch.zeros(8 * KIB, dtype=torch.uint8)
        with pytest.raises(
            torch.OutOfMemoryError,
            match="is out of memory.*allocate 4096 bytes; 8192 of its 10240 bytes",
        ):
            made[: 4 * KIB].clone()
        assert used(device) == 8 * KIB
        made[: 2 * KIB].clone()
        del made
        torch.zeros(10 * KIB, dtype=torch.uint8)


@of_both_kinds
def test_it_is_refused_in_the_middle_of_a_backward(make: Callable[[int], VirtualDevice]) -> None:
    device = make(5 * KIB)
    weight = torch.ones(KIB // 4, requires_grad=True)
    with device.compute.work():
        loss = (weight * 2).exp().sum()  # holds two of them
        with pytest.raises(torch.OutOfMemoryError):
            torch.autograd.backward([torch.cat([weight * 1] * 4).sum()])
        loss.backward()
    assert weight.grad is not None


def test_each_device_counts_its_own() -> None:
    first, second = VirtualDevice(0, KIB), VirtualDevice(1, KIB)
    with first.compute.work():
        one = torch.zeros(KIB, dtype=torch.uint8)
        with second.up.work():
            other = one.clone()
        assert (used(first), used(second)) == (KIB, KIB)
    del one, other


def test_memory_lent_to_a_lane_is_used_until_its_copy_is_done() -> None:
    """Before anything is refused, copies that still hold freed memory are waited for."""
    device = AdversarialDevice(0, num_bytes=10 * KIB)
    host = torch.zeros(6 * KIB, dtype=torch.uint8)
    with device.compute.work():
        made = torch.ones(6 * KIB, dtype=torch.uint8)
    device.down.wait(device.compute.record())
    device.down.copy_(host, made)
    device.down.borrow(made)
    del made
    assert used(device) == 6 * KIB
    with device.compute.work():
        again = torch.empty(10 * KIB, dtype=torch.uint8)
    assert used(device) == again.nbytes
    assert host.eq(1).all()
    assert device.faults == []


@of_both_kinds
def test_an_idle_engine_holds_its_slots(make: Callable[[int], VirtualDevice]) -> None:
    device = make(1 << 20)
    with RoundPipe(make_mlp(), devices=[device]) as engine:
        batch = mlp_batch(6)
        for _ in range(3):
            engine.forward_backward(batch.args, label=batch.label, loss_fn=batch.loss_fn)
            engine.step(lambda: None, is_async=False)
            output = engine(*batch.args)  # merged, so not on the device
        engine.synchronize()
        del output
        assert used(device) == engine.statistics()["slot_bytes"][device.name]
    assert used(device) == 0


def test_a_host_that_is_the_only_limit_is_not_counted() -> None:
    device = VirtualDevice(0)
    assert device.capacity is None
    assert device.limit_bytes() > 1 << 60
    with RoundPipe(nn.Linear(4, 4), devices=[device]) as engine:
        engine(torch.ones(2, 4))
