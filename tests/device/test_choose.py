"""Which devices an engine gets, and what it is refused."""

import pytest
import torch

from roundpipe.device.choose import choose_devices, own_share
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


def test_processes_of_a_host_share_its_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sees a single one was given it by its launcher; one that was started by none has
    all."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert own_share(4) == range(4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [own_share(there) for there in (0, 1, 2, 3, 8)] == [
        range(0),
        range(1),
        range(1, 2),
        range(1, 3),
        range(4, 8),
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 processes on this host see 2 accelerators"):
        own_share(2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # as where a script of Slurm's sets the rank alone
    with pytest.raises(ConfigError, match="LOCAL_RANK is 1, and LOCAL_WORLD_SIZE 1 .*set both"):
        own_share(4)
