"""Where the newest weights of one layer are: which copy is written, and which a call reads."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe.device.virtual import VirtualDevice
from roundpipe.memory.copier import PinnedCopier
from roundpipe.memory.pinning import HostMemory
from roundpipe.params.placement.device_state import DeviceState, Link
from roundpipe.params.placement.newest import Copy
from roundpipe.params.working import ParameterStore

MEMORY = HostMemory("alloc", accelerated=False)


class Layer:
    """One layer whose only weight is at first all zeros; version t of it is all t."""

    def __init__(self, *, second: bool = False) -> None:
        self.weight = nn.Parameter(torch.zeros(2))
        module = nn.Module()
        module.weight = self.weight
        self.store = ParameterStore([module], MEMORY)
        if second:
            self.store.make_second_buffers()
        [self.parameters], [self.where] = self.store.layers, self.store.whereabouts
        [self.use] = self.parameters.uses

    def take_device_state(self) -> None:
        device = VirtualDevice(0)
        link = Link(device, PinnedCopier(device.compute, MEMORY, 8))
        state = DeviceState(self.parameters, 0, link, threading.RLock())
        state.add_image()
        self.store.device_states[0] = state

    def write(self, version: int, *, aside: bool) -> str | None:
        """The name of the copy that it is written to."""
        copy = self.where.target([self.use], aside=aside)
        if copy is None:
            return None
        with torch.no_grad():
            self.where.tensors(copy, [self.use])[0].data.fill_(version)
        self.where.wrote(copy, version)
        return copy.name

    def read(self, version: int) -> float:
        """As a call at that version does, on the device if it is there."""
        image = self.where.image_at(version)
        found = self.store.working(self.use, version) if image is None else image
        return float(found.view(torch.float32)[0])


def home(layer: Layer) -> float:
    """What the user sees."""
    return float(layer.weight.detach()[0])


def test_with_one_copy_nothing_is_written_beside_calls() -> None:
    layer = Layer()
    assert layer.write(1, aside=True) is None
    assert layer.write(1, aside=False) == "OWN"
    assert layer.read(1) == home(layer) == 1.0


def test_two_copies_take_turns_and_the_version_before_stays_readable() -> None:
    layer = Layer(second=True)
    assert [layer.write(version, aside=True) for version in (1, 2, 3)] == [
        "SECOND",
        "OWN",
        "SECOND",
    ]
    assert (layer.read(2), layer.read(3)) == (2.0, 3.0)
    assert not layer.where.is_home


@pytest.mark.parametrize("last", [2, 3])
def test_at_home_the_user_sees_the_newest(last: int) -> None:
    layer = Layer(second=True)
    for version in range(1, last + 1):
        layer.write(version, aside=True)
    assert layer.where.bring_home(last)
    assert layer.where.is_home
    assert layer.read(last) == home(layer) == last
    assert layer.write(last + 1, aside=True) == "SECOND"
    assert (layer.read(last), layer.read(last + 1)) == (last, last + 1)


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_on_a_device_images_take_turns_after_the_copies_on_the_host(num_before: int) -> None:
    """Calls at the version before the first image read where it is on the host."""
    layer = Layer(second=True)
    for version in range(1, num_before + 1):
        layer.write(version, aside=True)
    layer.take_device_state()
    assert layer.read(num_before) == num_before
    for index in range(3):
        version = num_before + 1 + index
        assert layer.write(version, aside=True) == f"IMAGE_{index % 2}"
        assert (layer.read(version - 1), layer.read(version)) == (version - 1, version)
    assert layer.write(num_before + 4, aside=False) == "IMAGE_0", "in place"


def test_a_device_state_that_ends_brings_home_what_calls_read() -> None:
    layer = Layer()
    layer.take_device_state()
    for version in (1, 2):
        layer.write(version, aside=True)
    assert not layer.where.bring_home(1), "2 is newer"
    layer.store.device_states.clear()
    assert layer.read(1) == home(layer) == 1.0


def test_what_the_user_writes_in_place_is_read_instead_of_an_image() -> None:
    layer = Layer()
    layer.take_device_state()
    layer.write(1, aside=False)
    with torch.no_grad():
        layer.weight.fill_(9.0)
    assert layer.read(1) == 9.0
    assert layer.where.bring_home(1)
    assert home(layer) == 9.0


def test_a_full_device_has_no_idle_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the layer stays as it is, and its state is to leave."""

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("full")

    layer = Layer(second=True)
    layer.take_device_state()
    layer.write(1, aside=True)
    monkeypatch.setattr(DeviceState, "add_image", full)
    assert layer.write(2, aside=True) is None
    assert layer.read(1) == layer.read(2) == 1.0
    assert layer.store.device_states[0].is_unwanted
    assert layer.write(2, aside=False) == Copy.IMAGE_0.name
