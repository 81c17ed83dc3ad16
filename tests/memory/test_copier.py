"""Tensors go to a device and come back through a few slices of host memory: whole, also where an
interrupt has ended an earlier copy half-way.

The adversarial lane is the judge: its copies happen only when somebody waits for them, and give NaN
if what they read was written meanwhile.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from roundpipe.memory import copier as staged_module
from roundpipe.memory.copier import Pair, PinnedCopier
from roundpipe.memory.pinning import HostMemory
from roundpipe.testing.adversarial import AdversarialDevice

OFF = HostMemory("off", accelerated=False)
SLICES = [13, 256, 1 << 20]


@pytest.fixture(params=range(2))
def device(request: pytest.FixtureRequest) -> AdversarialDevice:
    return AdversarialDevice(0, seed=request.param)


@pytest.fixture(params=SLICES)
def slice_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(staged_module, "SLICE_BYTES", request.param)
    return int(request.param)


def tensors() -> list[Tensor]:
    """Of many sizes, one of them not contiguous; the first and the last are empty."""
    torch.manual_seed(0)
    return [
        torch.empty(0),
        torch.randn(7, 31),
        torch.tensor(2.5),
        torch.empty(4, 0),
        torch.randn(25),
        torch.randn(5, 3).T,
        torch.randn(11).to(torch.bfloat16),
        torch.arange(33),
        torch.randn(256),
        torch.empty(0),
    ]


def room_for(tensors: Sequence[Tensor], device: AdversarialDevice) -> list[Tensor]:
    with device.compute.work():
        return [torch.empty(t.shape, dtype=t.dtype, device=device.torch_device) for t in tensors]


def pairs_of(hosts: Sequence[Tensor], theres: Sequence[Tensor]) -> list[Pair]:
    return [Pair(*pair) for pair in zip(hosts, theres, strict=True)]


def are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def raise_at(
    place: int, of: Callable[..., None], error: type[BaseException]
) -> Callable[..., None]:
    """The same, but for one call, which raises."""
    places = iter(range(1 << 20))

    def wrapped(*given: object) -> None:
        if next(places) == place:
            raise error
        of(*given)

    return wrapped


def test_tensors_come_back_as_they_went_whatever_the_size_of_a_slice(
    slice_bytes: int, device: AdversarialDevice
) -> None:
    """Twice in a row, so that slices are filled again."""
    copies, sent = PinnedCopier(device.compute, OFF, 1 << 40), tensors()
    for _ in range(2):
        there, back = room_for(sent, device), zeros_like(sent)
        copies.up(pairs_of(sent, there))
        assert are_same(there, sent)
        copies.down(pairs_of(back, there))
        assert are_same(back, sent)
    assert not device.faults


def test_each_tensor_is_told_of_when_all_of_it_is_there(
    slice_bytes: int, device: AdversarialDevice
) -> None:
    copies, sent = PinnedCopier(device.compute, OFF, 1 << 40), tensors()
    there, back = room_for(sent, device), zeros_like(sent)
    copies.up(pairs_of(sent, there))
    told: list[int] = []

    def arrived(index: int) -> None:
        assert torch.equal(back[index], sent[index])
        told.append(index)

    copies.down(pairs_of(back, there), arrived=arrived)
    assert sorted(told) == list(range(len(sent)))


def test_what_nobody_wants_any_more_is_not_written(
    slice_bytes: int, device: AdversarialDevice
) -> None:
    copies, sent = PinnedCopier(device.compute, OFF, 1 << 40), tensors()
    there, back, told = room_for(sent, device), zeros_like(sent), list[int]()
    copies.up(pairs_of(sent, there))
    copies.down(pairs_of(back, there), lambda index: index != 1, told.append)
    assert back[1].count_nonzero() == 0
    assert 1 not in told
    assert are_same(back[2:], sent[2:])


@pytest.mark.parametrize("place", range(0, 16, 3))
def test_after_an_interrupt_on_the_way_up_everything_goes_up(
    place: int, slice_bytes: int, device: AdversarialDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has left under way reads slices that are filled again."""
    copies, sent = PinnedCopier(device.compute, OFF, 1 << 40), tensors()
    with monkeypatch.context() as patch:
        patch.setattr(
            device.compute, "copy_", raise_at(place, device.compute.copy_, KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            copies.up(pairs_of(sent, room_for(sent, device)) * 2)
    there = room_for(sent, device)
    copies.up(pairs_of(sent, there))
    assert are_same(there, sent)
    assert not device.faults


@pytest.mark.parametrize("place", range(0, 10, 3))
def test_after_an_interrupt_on_the_way_down_the_others_can_be_fetched(
    place: int, slice_bytes: int, device: AdversarialDevice
) -> None:
    """And those that were there already, which their owner has written to since, are left alone."""
    copies, sent = PinnedCopier(device.compute, OFF, 1 << 40), tensors()
    there, back, told = room_for(sent, device), zeros_like(sent), set[int]()
    copies.up(pairs_of(sent, there))
    with pytest.raises(KeyboardInterrupt):
        copies.down(pairs_of(back, there), arrived=raise_at(place, told.add, KeyboardInterrupt))
    for index in told:
        assert torch.equal(back[index], sent[index])
        back[index].zero_()
    others = [index for index in range(len(sent)) if index not in told]
    copies.down([Pair(back[index], there[index]) for index in others])
    for index, tensor in enumerate(back):
        assert torch.equal(tensor, torch.zeros_like(tensor) if index in told else sent[index])
    assert not device.faults


def test_a_copy_in_the_midst_of_another_needs_no_slice(
    slice_bytes: int, device: AdversarialDevice
) -> None:
    """As of a signal's handler that looks at what the main thread is just fetching."""
    copies, sent = PinnedCopier(device.compute, OFF, 1 << 40), tensors()
    there, back, inner = room_for(sent, device), zeros_like(sent), zeros_like(sent)
    copies.up(pairs_of(sent, there))
    seen: list[bool] = []

    def look(_: int) -> None:
        copies.down(
            pairs_of(inner, there),
            arrived=lambda index: seen.append(torch.equal(inner[index], sent[index])),
        )

    copies.down(pairs_of(back, there), arrived=look)
    assert are_same(back, sent)
    assert len(seen) == len(sent) ** 2
    assert all(seen)
    assert not device.faults


def test_threads_take_turns(device: AdversarialDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_module, "SLICE_BYTES", 100)
    copies, barrier = PinnedCopier(device.compute, OFF, 1 << 40), threading.Barrier(4)

    def there_and_back(seed: int) -> bool:
        torch.manual_seed(seed)
        sent = [torch.randn(50) for _ in range(4)]
        there, back = room_for(sent, device), zeros_like(sent)
        barrier.wait()
        copies.up(pairs_of(sent, there))
        copies.down(pairs_of(back, there))
        return are_same(back, sent)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(there_and_back, range(4)))
    assert not device.faults


def test_slices_exist_from_the_first_copy_to_the_end_and_are_no_larger_than_they_need_be() -> None:
    device = AdversarialDevice(0)
    copies, sent = PinnedCopier(device.compute, OFF, 1000), [torch.randn(900)]
    assert copies.slice_bytes == 1000
    assert PinnedCopier(device.compute, OFF, 0).slice_bytes == 1
    assert PinnedCopier(device.compute, OFF, 1 << 40).slice_bytes == staged_module.SLICE_BYTES
    for _ in range(2):
        copies.up([])
        assert not copies._slices
        copies.up(pairs_of(sent, room_for(sent, device)))
        slices = copies._slices
        assert [arena.num_bytes for arena in slices] == [1000] * staged_module.NUM_SLICES
        copies.up(pairs_of(sent, room_for(sent, device)))
        assert copies._slices is slices
        copies.close()


def test_slices_that_were_made_in_inference_mode_are_ordinary_memory() -> None:
    device, sent = AdversarialDevice(0), [torch.randn(9)]
    copies = PinnedCopier(device.compute, OFF, 1000)
    there = room_for(sent, device)
    with torch.inference_mode():
        copies.up(pairs_of(sent, there))
    copies.up(pairs_of(sent, there))
    assert are_same(there, sent)
