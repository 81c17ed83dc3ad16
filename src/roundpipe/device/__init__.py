"""The one seam between the engine and hardware: a device, its lanes and their events.

Imports `errors`, `trace` and `system`.
"""

from typing import Any

from .accelerator import AcceleratorDevice
from .choose import choose_devices, get_num_devices
from .protocol import Device, Event, Lane, Mark, MemoryInUse
from .virtual import VirtualDevice

__all__ = [
    "AcceleratorDevice",
    "Device",
    "Event",
    "Lane",
    "Mark",
    "MemoryInUse",
    "VirtualDevice",
    "get_num_devices",
]


def __getattr__(name: str) -> Any:
    # Made when somebody asks, because importing is to touch no device.
    if name == "device_list":
        return choose_devices(None, None)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
