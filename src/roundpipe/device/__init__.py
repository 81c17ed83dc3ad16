"""The one seam between the engine and hardware: a device, its lanes and their events.

Imports `errors`, `trace` and `system`.
"""

from .accelerator import AcceleratorDevice
from .protocol import Device, Event, Lane, Mark, MemoryInUse
from .virtual import VirtualDevice

__all__ = ["AcceleratorDevice", "Device", "Event", "Lane", "Mark", "MemoryInUse", "VirtualDevice"]
