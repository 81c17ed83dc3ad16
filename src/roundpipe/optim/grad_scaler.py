"""Loss scaling for fp16 over three threads: losses on workers, gradients on the optimizer thread,
the scale on yours. See [Note: iterations]."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from ..step import context
from ..step.handle import StepHandle
from ..step.hyperparameters import StepOptimizers
from .clipping import offloaded_squares
from .found_inf import NOTHING_CHECKED, Called, Checked, Iteration, Stage, unscale_gradient


class GradScaler:
    """``torch.amp.GradScaler`` for engines, safe across their threads.

    ``scale`` belongs into ``loss_fn``, ``unscale_`` and ``step`` into ``step_fn``, ``update`` after
    ``RoundPipe.step``. With synchronous steps scales and skipped steps are torch's exactly. With
    asynchronous ones what step t found takes effect at the next ``update``, always; each step is
    unscaled by the scale of its own losses.

    Args:
        device: accepted as torch's is, and ignored: gradients are on the host. A number is taken
            for ``init_scale``.
        init_scale, enabled: as torch's.
        growth_factor, growth_interval: the scale is multiplied with the first after as many steps
            in a row without an inf or NaN as the second says.
        backoff_factor: what the scale is multiplied with after a step with one.

    Raises:
        ConfigError: a growth factor of 1 or less, or a backoff factor of 1 or more.

    Example:
        >>> def loss_fn(outputs, target):
        ...     return scaler.scale(((outputs - target) ** 2).sum() / 64)
        >>> def step_fn():
        ...     scaler.unscale_(optimizer)
        ...     roundpipe.clip_grad_norm_(optimizer, 1.0)
        ...     scaler.step(optimizer)
        ...     optimizer.zero_grad()
        >>> for x, y in batches:
        ...     scaled_loss = engine.forward_backward((x,), label=y, loss_fn=loss_fn)
        ...     engine.step(step_fn)
        ...     scaler.update()
    """

    def __init__(
        self,
        device: str | float = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if isinstance(device, int | float):
            init_scale = float(device)
        if growth_factor <= 1.0:
            raise ConfigError(f"growth_factor is {growth_factor}; it must be more than 1")
        if backoff_factor >= 1.0:
            raise ConfigError(f"backoff_factor is {backoff_factor}; it must be less than 1")
        self._enabled = enabled
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        # Because workers read the scale while the caller's thread replaces it.
        self._lock = threading.Lock()
        # Replaced and never written: the backward of a loss multiplied with it may still be
        # running.
        self._scale = torch.full((), init_scale, dtype=torch.float32, device="cpu")
        self._multiplied: torch.Tensor | None = None  # the scale of the newest losses
        self._has_scaled = False  # since the last update
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device="cpu")
        self._current = Iteration()
        self._pending: Iteration | None = None  # the one before, its findings not yet taken up
        self._is_async = False
        self._calls: weakref.WeakKeyDictionary[StepOptimizers, Called] = weakref.WeakKeyDictionary()
        context.listen(self)

    def __repr__(self) -> str:
        return f"GradScaler({self.get_scale()})" if self._enabled else "GradScaler(enabled=False)"

    # In loss_fn, on workers.

    def scale(self, outputs: Any) -> Any:
        """Multiplies ``outputs`` by the scale: a tensor of any shape, or a list, tuple or iterable
        of such. Any thread may call it.

        Raises:
            ConfigError: there is something else among them.
        """
        if not self._enabled:
            return outputs
        with self._lock:
            self._multiplied = scale = self._scale
            self._has_scaled = True
        return _times(outputs, scale)

    # In step_fn, on the optimizer thread.

    def step_called(self, step: StepOptimizers, handle: StepHandle, is_async: bool) -> None:
        """Notes the scale that belongs to a step. `RoundPipe.step` calls it, on the caller's thread
        and before the step is queued, with the ``step``, its ``handle`` and its ``is_async``."""
        with self._lock:
            # A rank may have no losses of its own between two updates.
            own = self._multiplied if self._has_scaled or step.ranks.count == 1 else self._scale
            self._calls[step] = Called(self._current, own)
            self._current.steps.append(handle)
            self._is_async = is_async

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of the optimizer's parameters by the scale and looks for infs and
        NaNs in them.

        The division is applied when the gradients are read. Once per optimizer and iteration,
        before ``step``.

        Raises:
            RuntimeError: it was called before, or ``step`` was.
            ConfigError: outside ``step_fn``; or masters are fp16, in which what was unscaled may
                vanish.
        """
        if not self._enabled:
            return
        called, checked = self._look_up(optimizer, "unscale_()")
        if checked.stage is Stage.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if checked.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._unscale(optimizer, called, checked)
        checked.stage = Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless a gradient of any of its parameters is inf or NaN; unscales
        first if need be.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returned; None if it was skipped.

        Raises:
            RuntimeError: it was called before in this iteration, or with a closure.
            ConfigError: outside ``step_fn``; or no parameter has a gradient.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        called, checked = self._look_up(optimizer, "step()")
        if checked.stage is Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if checked.stage is Stage.READY:
            self._unscale(optimizer, called, checked)
        if checked.found_inf is None:
            raise ConfigError(
                "no parameter of this optimizer has a gradient, so there is nothing to step"
            )
        result = None if checked.found_inf else optimizer.step(*args, **kwargs)
        checked.stage = Stage.STEPPED
        return result

    def _look_up(self, optimizer: torch.optim.Optimizer, what: str) -> tuple[Called, Checked]:
        step = context.current_step()
        if step is None:
            raise ConfigError(
                f"GradScaler.{what} was called outside step_fn, where there is no gradient"
            )
        called = self._calls.get(step)
        if called is None:
            raise ConfigError(
                "this GradScaler was made after step() was called; make it before the first loss"
            )
        return called, called.iteration.optimizers.setdefault(id(optimizer), Checked())

    @torch.no_grad()
    def _unscale(self, optimizer: torch.optim.Optimizer, called: Called, checked: Checked) -> None:
        if called.scale is None:
            raise ConfigError(
                "no loss was multiplied by GradScaler.scale() before this step; do so in loss_fn"
            )
        parameters = context.parameters_of(optimizer)
        for parameter in parameters:
            if parameter.dtype is torch.float16 and getattr(parameter, "is_owned", True):
                raise ConfigError(
                    f"the optimizer's copy of a parameter of shape {tuple(parameter.shape)} is "
                    "torch.float16, in which "
                    "an unscaled gradient may vanish; pass optim_dtype=torch.float32 to RoundPipe"
                )
        inverse = float(called.scale.double().reciprocal().float())
        squares = offloaded_squares(parameters)
        found = [
            unscale_gradient(parameter, square, inverse)
            for parameter, square in zip(parameters, squares, strict=True)
        ]
        checks = [found_inf for found_inf in found if found_inf is not None]
        found_here = -1.0 if not checks else float(any(checks))
        step = context.current_step()
        assert step is not None
        (found_anywhere,) = step.ranks.combined([found_here], torch.maximum)
        checked.found_inf = None if found_anywhere < 0 else bool(found_anywhere)

    # On the caller's thread.

    def update(
        self, new_scale: float | torch.Tensor | None = None, is_async: bool | None = None
    ) -> None:
        """Moves the scale: back if a gradient was inf or NaN, up after ``growth_interval`` steps
        without.

        Waits for the steps whose findings it takes up, see [Note: iterations].

        Args:
            new_scale: the scale from now on, in place of those findings.
            is_async: whether this iteration's own findings are left for the next ``update``; None
                follows the last ``RoundPipe.step``.

        Raises:
            ConfigError: in ``step_fn``, a layer or ``loss_fn``; or no gradient was checked since
                the last ``update``.
        """
        context.refuse_inside("GradScaler.update()")
        if not self._enabled:
            return
        if new_scale is None and not self._current.steps:
            raise ConfigError(NOTHING_CHECKED)
        waits_on = self._is_async if is_async is None else is_async
        due = [self._pending] if waits_on else [self._pending, self._current]
        try:
            asked = due if new_scale is None else []
            found = [iteration.wait_found() for iteration in asked if iteration is not None]
        except ConfigError:
            self._pending = None  # because what was amiss then is not to come up again
            raise
        scale, tracker = self._scale.clone(), self._growth_tracker.clone()
        if new_scale is not None:
            scale.fill_(float(new_scale))
        for flags in filter(None, found):
            found_inf = torch.full((), float(any(flags)), dtype=torch.float32, device="cpu")
            torch._amp_update_scale_(
                scale,
                tracker,
                found_inf,
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
        with self._lock:
            self._scale, self._growth_tracker, self._has_scaled = scale, tracker, False
            self._pending = self._current if waits_on else None
            self._current = Iteration()

    def get_scale(self) -> float:
        """The scale of the next losses; 1.0 if disabled."""
        return float(self._scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The factor that the scale grows by."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Makes the scale grow by ``new_factor`` from the next ``update`` on."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """The factor that the scale is multiplied with after an inf or NaN."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Makes the scale shrink by ``new_factor`` from the next ``update`` on."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """The number of steps in a row without an inf or NaN after which the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Makes the scale grow after ``new_interval`` such steps."""
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """False if every method passes its argument on and does nothing else."""
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's entries, and what the last step found if that is still to be taken up.

        Call it after ``update``. Waits for that step. Empty if disabled.
        """
        context.refuse_inside("GradScaler.state_dict()")
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._growth_tracker),
            "_found_pending": (None if self._pending is None else self._pending.wait_found())
            or None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the ``state_dict`` of another, or of a ``torch.amp.GradScaler``. Does nothing
        if disabled.

        Raises:
            ConfigError: the state is empty, as a disabled scaler's is, or lacks an entry; nothing
                was changed.
        """
        context.refuse_inside("GradScaler.load_state_dict()")
        if not self._enabled:
            return
        missing = [name for name in _TORCH_STATE if name not in state_dict]
        if missing:
            raise ConfigError(
                f"the scaler's state lacks {', '.join(missing)}; was it saved by a disabled "
                "GradScaler?"
            )
        found = state_dict.get("_found_pending")
        pending = None if found is None else Iteration(map(Checked, found))
        with self._lock:
            self._scale = torch.full((), state_dict["scale"], dtype=torch.float32, device="cpu")
            self._growth_tracker = torch.full(
                (), state_dict["_growth_tracker"], dtype=torch.int32, device="cpu"
            )
            self._current, self._pending, self._multiplied = Iteration(), pending, None
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]


_TORCH_STATE = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _times(outputs: Any, scale: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs * scale.to(outputs.device, non_blocking=True)
    if isinstance(outputs, list | tuple):
        return type(outputs)(_times(output, scale) for output in outputs)
    if isinstance(outputs, Iterable):
        return (_times(output, scale) for output in outputs)
    raise ConfigError(
        f"scale() takes a tensor or an iterable of tensors, not a {type(outputs).__name__}"
    )
