"""Which devices an engine gets: what the user named, every visible accelerator, or virtual ones."""

from collections import Counter
from collections.abc import Sequence

import torch

from ..errors import ConfigError
from .accelerator import AcceleratorDevice
from .protocol import Device
from .virtual import VirtualDevice

DeviceSpec = int | Sequence[torch.device | str | Device] | None


def choose_devices(devices: DeviceSpec, max_gpu_memory: float | None) -> list[Device]:
    """Resolves the ``devices`` argument.

    Args:
        devices: None for every visible accelerator, else one virtual device; an int for that many
            virtual devices; or a list of devices.
        max_gpu_memory: bytes, or GB if below 2**20, that the engine keeps under on each device.

    Raises:
        ConfigError: no device, one that does not exist, or one that is named twice; no memory.
    """
    if max_gpu_memory is not None and not (
        isinstance(max_gpu_memory, (int, float)) and max_gpu_memory > 0
    ):
        raise ConfigError(
            f"max_gpu_memory is {max_gpu_memory!r}; it must be a positive number of bytes, or of GB"
        )
    max_bytes = (
        None
        if max_gpu_memory is None
        else int(max_gpu_memory * (2**30 if max_gpu_memory < 2**20 else 1))
    )
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.device("cuda", index) for index in range(count)] or 1
    if isinstance(devices, int):
        if devices < 1:
            raise ConfigError(f"devices is {devices}; an engine needs at least 1")
        return [VirtualDevice(index, max_bytes) for index in range(devices)]
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ConfigError(
            f"devices is {devices!r}; give an int (virtual devices) or a list such as ['cuda:0']"
        )
    chosen = [_resolve(device, index, max_bytes) for index, device in enumerate(devices)]
    twice = [name for name, count in Counter(device.name for device in chosen).items() if count > 1]
    if twice:
        # Two workers would draw from one generator, each in the middle of the other's layers.
        raise ConfigError(f"devices names {', '.join(twice)} more than once; name each device once")
    return chosen


def _resolve(device: torch.device | str | Device, index: int, max_bytes: int | None) -> Device:
    if not isinstance(device, (str, torch.device)):
        return device
    where = torch.device(device)
    return (
        VirtualDevice(index, max_bytes)
        if where.type == "cpu"
        else AcceleratorDevice(where, max_bytes)
    )
