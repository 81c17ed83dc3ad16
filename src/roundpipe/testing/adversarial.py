"""A virtual device for tests on which a missing wait fails every time. Slow, and never chosen
unless it is named.

[Note: the adversary] The CPU does at once what an accelerator does some time later, so on a plain
virtual device a missing wait goes unnoticed. Here

[1] a copy is written only when somebody waits for an event recorded after it; until then its target
    holds NaN, which is also what a reused slot holds;
[2] what a copy reads must not change between the moment it might begin and the moment it ends;
[3] whoever copies must come, by events, after the lane that last wrote the source and after all
    that used the target;
[4] memory freed during a copy must have been lent to that copy's lane;
[5] a tensor on one device is not on another: handing it over is a real copy through two lanes.

Against [2] to [4] the copy delivers NaN, and the device says in ``faults`` what was wrong. Copies
that may run in either order run in an order drawn from the seed, which also decides when threads
give way to each other.
"""

import random
from typing import Any

import torch

from ..device.capacity import VirtualMemory
from ..device.virtual import VirtualDevice
from .lanes import AdversarialLane, hand_to_caller, home_of


class AdversarialDevice(VirtualDevice):
    """One of any number of devices on the CPU. See [Note: the adversary].

    Args:
        index: position among the engine's devices, for its name.
        seed: which order lanes and threads take where they are free to choose.
        num_bytes: as of a `VirtualDevice`. Memory that was lent to a lane is used until its copies
            are done.

    Example:
        >>> devices = [AdversarialDevice(index, seed=7) for index in range(2)]
        >>> with RoundPipe(model, devices=devices) as engine:
        ...     loss = engine.forward_backward((x,), label=y, loss_fn=loss_fn)
        >>> assert not any(device.faults for device in devices)
    """

    def __init__(self, index: int, *, seed: int = 0, num_bytes: int | None = None) -> None:
        super().__init__(index)
        self.name = f"adversarial:{index}"
        self.capacity = (
            None if num_bytes is None else VirtualMemory(self.name, num_bytes, self._finish_copies)
        )
        # With an index it equals the device of no tensor, so that ``Tensor.to`` always copies. See
        # [5].
        self.torch_device = torch.device("cpu", index)
        self.faults: list[str] = []
        draws = random.Random(f"{seed}.{index}")
        self.compute: AdversarialLane = AdversarialLane(self, "compute", draws)
        self.up: AdversarialLane = AdversarialLane(self, "up", draws)
        self.down: AdversarialLane = AdversarialLane(self, "down", draws)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Says that a ``tensor`` is here if it was made or brought here. See [5]."""
        return home_of(tensor) is self

    def count(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Counts the memory of what an ``operation``, called with ``args`` and ``kwargs``, has
        ``made``."""
        if self.capacity is not None:
            self.capacity.count(operation, (*args, *kwargs.values()), made)

    def _finish_copies(self) -> None:
        """As an accelerator's allocator waits for memory that was freed, but is still in use."""
        for lane in (self.compute, self.up, self.down):
            lane.finish()

    def lend_to_caller(self, tensor: torch.Tensor) -> None:
        """The calling thread must have waited for whatever wrote ``tensor``. It is the host's from
        then on."""
        if not hand_to_caller(tensor):
            self.faults.append(
                f"{self.name}: the caller got {tuple(tensor.shape)} {tensor.dtype} without waiting"
            )
