"""Which devices an engine gets, and what it is refused."""

import pytest
import torch

from roundpipe.device.choose import choose_devices
from roundpipe.device.virtual import VirtualDevice
from roundpipe.errors import ConfigError
from tests.support.device_sets import ACCELERATORS


def test_a_number_or_names_of_the_cpu_give_virtual_devices_of_their_own() -> None:
    assert [device.name for device in choose_devices(3, None)] == [
        "virtual:0",
        "virtual:1",
        "virtual:2",
    ]
    assert [device.name for device in choose_devices(["cpu", torch.device("cpu")], None)] == [
        "virtual:0",
        "virtual:1",
    ]


def test_a_device_given_twice_is_refused() -> None:
    """Two workers on one device would draw from its generator in the middle of each other's
    layers."""
    device = VirtualDevice(7)
    with pytest.raises(ConfigError, match="virtual:7 more than once"):
        choose_devices([device, VirtualDevice(0), device], None)


@pytest.mark.gpu
@pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device")
def test_also_under_two_names() -> None:
    with pytest.raises(ConfigError, match=f"cuda:{torch.cuda.current_device()} more than once"):
        choose_devices(["cuda", f"cuda:{torch.cuda.current_device()}"], None)
