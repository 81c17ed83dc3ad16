"""Asks the system and its cards what they are, before anything runs on them."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import ConfigError
from .protocol import Device

_DRIVER = Path("/proc/driver/nvidia/version")


class Facts(NamedTuple):
    """``model``: as its maker names it; bytes of all its memory, and of what is free; ``dtype``:
    the one that its matrix products are fast in."""

    model: str
    total_bytes: int
    free_bytes: int
    dtype: torch.dtype


def facts_of(device: Device) -> Facts | None:
    """None for a virtual device, which has the host's."""
    where = device.torch_device
    if where.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(where)
    with torch.cuda.device(where):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        free, total = torch.cuda.mem_get_info()
    return Facts(properties.name, total, free, torch.bfloat16 if has_bf16 else torch.float16)


def refuse_without_fp8(devices: Iterable[Device]) -> None:
    """Virtual devices have fp8: they compute with its numbers, not faster.

    Raises:
        ConfigError: some device is a card that multiplies no fp8 matrices.
    """
    for device in devices:
        where = device.torch_device
        if where.type != "cuda":
            continue
        card = torch.cuda.get_device_properties(where)
        if torch.version.hip is not None or (card.major, card.minor) < (8, 9):
            raise ConfigError(
                f"compute_dtype='fp8': {device.name} is a {card.name} (compute capability "
                f"{card.major}.{card.minor}), which has no fp8 products; NVIDIA cards from 8.9 on "
                "have them (Ada, Hopper, Blackwell). Leave compute_dtype out: bf16 weights "
                "compute in bf16 here"
            )


def has_grouped_products(device: torch.device) -> bool:
    """True if torch has products of groups of rows there, each with a matrix of its own."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def driver() -> str | None:
    """The accelerators' driver as it names itself; None where the system has none."""
    try:
        return _DRIVER.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        return None


def has_accelerators() -> bool:
    """True if torch can use any."""
    return torch.cuda.is_available()
