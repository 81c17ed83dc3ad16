"""Unpinned weights go through a few slices of page-locked memory: they arrive whole, and a slice is
filled again only when the copy out of it is over.

The adversarial lane is the judge: its copies happen only when somebody waits for them, and give NaN
if what they read was written meanwhile.
"""

import concurrent.futures

import pytest
import torch
from torch import Tensor, nn

from roundpipe.memory import ring as ring_module
from roundpipe.memory.pinning import HostMemory
from roundpipe.memory.ring import NUM_SLICES, Piece, PinnedRing
from roundpipe.params.working import ParameterStore
from roundpipe.testing.adversarial import AdversarialDevice
from roundpipe.transfer import sender as sender_module
from roundpipe.transfer.sender import RingSender, make_sender, view_of
from tests.support.optimizers import Gate

OFF = HostMemory("off", accelerated=False)
LENGTHS = [700, 1, 0, 255, 300]


@pytest.fixture(params=range(3))
def device(request: pytest.FixtureRequest) -> AdversarialDevice:
    return AdversarialDevice(0, seed=request.param)


def pieces_with_gaps() -> tuple[list[Piece], Tensor, Tensor]:
    """Pieces 256 bytes aligned, some with room for another one between them; the target they belong
    in, and which of its bytes may be written."""
    generator = torch.Generator().manual_seed(0)
    pieces, offset = [], 256
    for number, length in enumerate(LENGTHS):
        pieces.append(
            Piece(offset, torch.randint(0, 255, (length,), dtype=torch.uint8, generator=generator))
        )
        offset += -(-length // 256) * 256 + 256 * (number % 2)
    expected, is_padding = (
        torch.zeros(offset, dtype=torch.uint8),
        torch.zeros(offset, dtype=torch.bool),
    )
    for start, content in pieces:
        expected[start : start + len(content)] = content
        is_padding[start + len(content) : -(-(start + len(content)) // 256) * 256] = True
    return [pieces[3], *pieces[:3], *pieces[4:]], expected, is_padding


@pytest.mark.parametrize("slice_bytes", [1, 100, 256, 1000, 1 << 20])
def test_pieces_arrive_whole_whatever_the_size_of_a_slice(
    slice_bytes: int, device: AdversarialDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing between them is written, for other weights may lie there. Sent twice in a row, so
    that slices are filled again while earlier copies may still be under way."""
    monkeypatch.setattr(ring_module, "SLICE_BYTES", slice_bytes)
    pieces, expected, is_padding = pieces_with_gaps()
    ring = PinnedRing(device.up, OFF, largest=len(expected))
    targets = [torch.zeros(len(expected), dtype=torch.uint8) for _ in range(2)]
    for target in targets:
        ready = ring.send(target, pieces, lambda: True)
    ready.wait()
    for target in targets:
        assert torch.equal(target[~is_padding], expected[~is_padding])
    assert not device.faults
    ring.close()


def test_a_ring_is_no_larger_than_what_goes_through_it() -> None:
    device = AdversarialDevice(0)
    assert PinnedRing(device.up, OFF, largest=1000).slice_bytes == 1000
    assert PinnedRing(device.up, OFF, largest=1 << 40).slice_bytes == ring_module.SLICE_BYTES


def test_what_nobody_wants_any_more_is_left_unsent(
    device: AdversarialDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked before every slice."""
    monkeypatch.setattr(ring_module, "SLICE_BYTES", 100)
    answers = iter([True, True, False])
    content = torch.ones(1000, dtype=torch.uint8)
    target = torch.zeros(1000, dtype=torch.uint8)
    PinnedRing(device.up, OFF, largest=1000).send(
        target, [Piece(0, content)], lambda: next(answers)
    ).wait()
    assert target.count_nonzero() == 200


def test_a_layer_without_weights_is_there_at_once(device: AdversarialDevice) -> None:
    ring = PinnedRing(device.up, OFF, largest=0)
    for _ in range(NUM_SLICES + 1):
        ready = ring.send(torch.zeros(0, dtype=torch.uint8), [], lambda: True)
        assert ready.is_reached, "somebody has to wait for copies, though there is nothing to copy"


# The helper thread that fills the ring.


def store_of(*parameters: nn.Parameter) -> ParameterStore:
    layer = nn.Module()
    for index, parameter in enumerate(parameters):
        layer.register_parameter(f"p{index}", parameter)
    return ParameterStore([layer], OFF)


def test_every_kind_of_parameter_arrives(device: AdversarialDevice) -> None:
    """Of any dtype and layout, empty or at an odd address, as in a file whose tensors are not
    aligned."""
    odd = torch.arange(41, dtype=torch.uint8)[1:].view(torch.uint8)
    parameters = [
        nn.Parameter(torch.randn(5, 3)),
        nn.Parameter(torch.randn(3, 4).T),
        nn.Parameter(torch.randn(7).to(torch.bfloat16)),
        nn.Parameter(torch.empty(0, 4)),
        nn.Parameter(torch.tensor(2.5)),
        nn.Parameter(torch.arange(6), requires_grad=False),
        nn.Parameter(odd, requires_grad=False),
        nn.Parameter(torch.randn(2, dtype=torch.complex64)),
    ]
    store = store_of(*parameters)
    sender = make_sender(device, store, OFF)
    assert isinstance(sender, RingSender)
    slot = torch.zeros(store.layers[0].num_bytes, dtype=torch.uint8)
    sender.send(store.layers[0], store.layers[0].uses, slot).arrive(device.compute)
    device.compute.record().wait()
    for use in store.layers[0].uses:
        assert torch.equal(view_of(slot, use), use.parameter)
    stop(sender)


def test_a_shipment_given_up_touches_nothing_afterwards(
    device: AdversarialDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may give the slot back, and the optimizer write the weights, as soon as `give_up`
    returns: it waits for a helper that may be reading them."""
    store = store_of(nn.Parameter(torch.randn(100)))
    sender = RingSender(device, store, OFF)
    gate = Gate()
    sender.helper.submit(gate.pause)
    slot = torch.zeros(store.layers[0].num_bytes, dtype=torch.uint8)
    shipment = sender.send(store.layers[0], store.layers[0].uses, slot)
    gate.wait_reached()
    monkeypatch.setattr(
        sender_module, "wait", lambda futures: (gate.open(), concurrent.futures.wait(futures))
    )
    shipment.give_up()
    assert shipment._queued.done()
    device.up.record().wait()
    assert slot.count_nonzero() == 0
    stop(sender)


def test_what_the_helper_runs_into_is_raised_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the shipments after it go through."""
    store = store_of(nn.Parameter(torch.randn(4)))
    device = AdversarialDevice(0)
    sender = RingSender(device, store, OFF)
    slot = torch.zeros(store.layers[0].num_bytes, dtype=torch.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(PinnedRing, "_send_slice", lambda *_: 1 / 0)
        failing = sender.send(store.layers[0], store.layers[0].uses, slot)
        with pytest.raises(ZeroDivisionError):
            failing.arrive(device.compute)
        failing.give_up()
    sender.send(store.layers[0], store.layers[0].uses, slot).arrive(device.compute)
    device.compute.record().wait()
    assert torch.equal(view_of(slot, store.layers[0].uses[0]), store.parameters[0])
    stop(sender)


def stop(sender: RingSender) -> None:
    sender.helper.stop()
    sender.helper.join()
    sender.close()
