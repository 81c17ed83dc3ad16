"""Says what would fit where nothing does."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan.memory import readable
from ..system.sizes import in_gb
from .machine import CONTEXT_BYTES, PROCESS_BYTES, Machine
from .ways import Choice


@dataclass(frozen=True)
class Failure:
    """A failed way needs this much of a device and of the host, where the optimizer's state takes
    ``state_bytes`` of it; ``why`` if it fails otherwise."""

    choice: Choice
    device_bytes: int
    host_bytes: int
    state_bytes: int
    why: str = ""


def what_would_fit(
    failures: Sequence[Failure],
    machine: Machine,
    device_bytes: int,
    ram_bytes: int,
    *,
    is_full: bool,
    can_split: bool,
) -> str:
    """Says what the smallest ways need, and what is left to do for what is short.

    Args:
        failures: of all ways.
        device_bytes, ram_bytes: of a device and of the host, for tensors.
        is_full: all weights train.
        can_split: there may be more microbatches.
    """
    could = [each for each in failures if not each.why]
    if not could:
        return f"nothing fits: {failures[0].why}"
    device = min(could, key=lambda each: each.device_bytes)
    host = min(could, key=lambda each: each.host_bytes)
    # A plan fills nine tenths of what is free (`autoplan/memory_limit.py`).
    gpu = (device.device_bytes / 0.9 + CONTEXT_BYTES) / 1e9
    beside, ram = ((one.host_bytes + PROCESS_BYTES) / 1e9 for one in (device, host))
    has_device = device.device_bytes <= device_bytes
    has_host = host.host_bytes <= ram_bytes
    remedies = []
    if not has_device or has_host:  # where both are enough, it is not for the same way
        remedies.append("make seq smaller" + " or num_microbatch larger" * can_split)
    if not has_host or has_device:
        helps = host.host_bytes - host.state_bytes <= ram_bytes
        more = _for_the_host(host.choice, is_full=is_full, disk_helps=helps)
        remedies += more or ["make batch or seq smaller"]
    return (
        f"nothing fits into {machine.gpus} x {in_gb(machine.gpu_memory)} of device memory "
        f"({readable(device_bytes)} for tensors) and {in_gb(machine.ram)} of host memory. "
        f"Of {len(could)} ways the smallest on a device ({device.choice}) needs {gpu:.1f} GB there "
        f"and {beside:.1f} GB of host memory, the smallest on the host ({host.choice}) needs "
        f"{ram:.1f} GB of that; {', or '.join(remedies)}"
    )


def _for_the_host(smallest: Choice, *, is_full: bool, disk_helps: bool) -> list[str]:
    if is_full:
        on_disk = "put optimizer state on a disk (optimizer_state_dir)"
        adapters = "train adapters of a quantized model (lora, quantization)"
        is_there = smallest.optimizer_state_dir is not None
        return [on_disk, adapters] if disk_helps and not is_there else [adapters]
    found = []
    if smallest.quantization == "none" and smallest.pin_model == "alloc":
        found.append("quantize the weights (quantization)")
    if smallest.pin_model == "alloc":
        found.append("leave weights in their files (pin_model='off')")
    return found
