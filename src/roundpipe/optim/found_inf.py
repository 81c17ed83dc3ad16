"""Infs and NaNs in gradients: looking for them, and which iteration of a `GradScaler` they count
in.

[Note: iterations] An iteration lies between two calls of ``update``. A step belongs to the
iteration in which it was called, and what it finds is kept there. A synchronous ``update`` takes up
its own iteration; an asynchronous one the iteration before, whether or not its own step is already
done, so that timing decides nothing.
"""

import math
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import torch

from ..errors import ConfigError
from ..kernels.chunks import chunks
from ..params.window import Master
from ..step.handle import StepHandle

NOTHING_CHECKED = (
    "no gradient was checked since the last GradScaler.update(); call scaler.step(optimizer) in a "
    "step_fn first"
)


class Stage(Enum):
    """READY -> UNSCALED by ``unscale_``; either -> STEPPED by ``step``. A new iteration begins at
    READY."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


class Checked:
    """What one iteration knows of one optimizer. ``found_inf`` is None until some gradient was
    looked at."""

    def __init__(self, found_inf: bool | None = None) -> None:
        self.stage = Stage.READY
        self.found_inf = found_inf


class Iteration:
    """See [Note: iterations]. ``optimizers`` belongs to the optimizer thread until all of ``steps``
    are over."""

    def __init__(self, found_before: Iterable[Checked] = ()) -> None:
        self.steps: list[StepHandle] = []
        self.optimizers: dict[int, Checked] = dict(enumerate(found_before))

    def wait_found(self) -> list[bool]:
        """Blocks until its steps are over: one entry per optimizer that was checked, True for infs
        or NaNs.

        Raises:
            ConfigError: no step failed, and yet none checked a gradient.
        """
        have_succeeded = [handle.wait_over() for handle in self.steps]
        found = [
            checked.found_inf
            for checked in self.optimizers.values()
            if checked.found_inf is not None
        ]
        if not found and all(have_succeeded):
            raise ConfigError(NOTHING_CHECKED)
        return found


class Called(NamedTuple):
    """What a step remembers of its call: its iteration, and the scale that its losses were
    multiplied with."""

    iteration: Iteration
    scale: torch.Tensor | None


def unscale_gradient(parameter: torch.Tensor, square: float | None, inverse: float) -> bool | None:
    """Whether the gradient has infs or NaNs; None if there is no gradient."""
    if isinstance(parameter, Master):
        parts = parameter.offloaded()
        if not parts:
            return None
        parameter.scale *= inverse
        if square is not None and math.isfinite(square):
            return False  # the device has looked already
        # Uses of a tied weight may each be finite and their sum not; a square may overflow where
        # its root does not.
        values = parts if len(parts) == 1 else (chunk for _, chunk in chunks(parts))
        return not all(map(_is_finite, values))
    if parameter.grad is None:
        return None
    found_inf = torch.zeros((), dtype=torch.float32, device=parameter.grad.device)
    torch._amp_foreach_non_finite_check_and_unscale_(
        [parameter.grad], found_inf, torch.full_like(found_inf, inverse)
    )
    return bool(found_inf)


def _is_finite(values: torch.Tensor) -> bool:
    """In one pass that writes nothing: both extremes are NaN if any value is."""
    if values.numel() == 0:
        return True
    smallest, largest = torch.aminmax(values)
    return bool(torch.isfinite(smallest) & torch.isfinite(largest))
