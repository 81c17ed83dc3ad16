"""Which devices an engine gets: what the user named, every visible accelerator, or virtual ones."""

import os
from collections import Counter
from collections.abc import Sequence

import torch

from ..errors import ConfigError
from ..system.sizes import bytes_of
from .accelerator import AcceleratorDevice
from .protocol import Device
from .virtual import VirtualDevice

DeviceSpec = int | Sequence[torch.device | str | Device] | None


def virtual(num_devices: int) -> list[torch.device]:
    """Makes virtual CPU devices for ``devices=``, also on a machine that has accelerators.

    Args:
        num_devices: how many; numbers do not depend on it with the same ``num_microbatch``.

    Raises:
        ConfigError: fewer than one.

    Example:
        >>> engine = RoundPipe(nn.Linear(4, 4), devices=virtual(2))
        >>> [device.name for device in engine.devices]
        ['virtual:0', 'virtual:1']
        >>> engine.close()
    """
    if num_devices < 1:
        raise ConfigError(f"virtual({num_devices}); an engine needs at least 1 device")
    return [torch.device("cpu")] * num_devices


def get_num_devices() -> int:
    """Returns how many devices an engine gets where ``devices`` is left out: every visible
    accelerator, else one virtual device."""
    return len(_first(None))


def choose_devices(
    devices: DeviceSpec, max_gpu_memory: str | float | None, *, are_shared: bool = False
) -> list[Device]:
    """Resolves the ``devices`` argument.

    Args:
        devices: None for every visible accelerator, else one virtual device; an int for the first
            so many accelerators where there are any, else for that many virtual devices; or a list
            of devices, such as ``virtual(2)``.
        max_gpu_memory: what the engine keeps under on each device: a string with a unit
            (``"24GB"``, ``"900MiB"``), or a number of GB.
        are_shared: by the processes that a launcher has started on this host; those visible then
            are this one's share. See `own_share`.

    Raises:
        ConfigError: no device, one that does not exist, or one that is named twice; no memory.
    """
    max_bytes = None if max_gpu_memory is None else bytes_of(max_gpu_memory, "max_gpu_memory")
    if devices is None or (isinstance(devices, int) and not isinstance(devices, bool)):
        devices = _first(devices, are_shared=are_shared)
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ConfigError(
            f"devices is {devices!r}; give a number of devices or a list such as ['cuda:0']"
        )
    chosen = [_resolve(device, index, max_bytes) for index, device in enumerate(devices)]
    twice = [name for name, count in Counter(device.name for device in chosen).items() if count > 1]
    if twice:
        # Two workers would draw from one generator, each in the middle of the other's layers.
        raise ConfigError(f"devices names {', '.join(twice)} more than once; name each device once")
    return chosen


def own_share(there: int) -> range:
    """Returns which of so many visible accelerators are this process's, one of several that
    torchrun or accelerate have started on this host: neighbours, as many for each if that is even.
    A single one is its own, because the launcher has seen to that.

    Raises:
        ConfigError: fewer accelerators than processes, or a process that is none of them.
    """
    rank, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if there < 2:
        return range(there)
    if not 0 <= rank < count:
        raise ConfigError(
            f"LOCAL_RANK is {rank}, and LOCAL_WORLD_SIZE {count} (1 where it is not set); set "
            "both, as torchrun and accelerate do, or name each process's accelerators in devices"
        )
    if there < count:
        raise ConfigError(
            f"{count} processes on this host see {there} accelerators; start at most {there}, or "
            "name each one's in devices"
        )
    return range(there * rank // count, there * (rank + 1) // count)


def _first(count: int | None, *, are_shared: bool = False) -> list[torch.device]:
    """The first so many accelerators (None: all), or so many virtual devices where there are
    none."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = own_share(visible) if are_shared else range(visible)
    if count is not None and count < 1:
        raise ConfigError(f"devices is {count}; an engine needs at least 1")
    if not there:
        return virtual(count or 1)
    if count is not None and count > len(there):
        whose = "for this process" if are_shared else "accelerators"
        raise ConfigError(
            f"devices is {count}, but there are {len(there)} {whose}; give at most {len(there)}, "
            f"or roundpipe.virtual({count}) for virtual devices on the CPU"
        )
    return [torch.device("cuda", index) for index in there[:count]]


def _resolve(device: torch.device | str | Device, index: int, max_bytes: int | None) -> Device:
    if not isinstance(device, (str, torch.device)):
        return device
    where = torch.device(device)
    return (
        VirtualDevice(index, max_bytes)
        if where.type == "cpu"
        else AcceleratorDevice(where, max_bytes)
    )
