"""`accelerate.Accelerator` for plain training loops over a pipeline engine.

[Note: a plain loop] What such a loop calls inline belongs to the engine: clipping and the update
run in the engine's step, where the gradients are. So the optimizer that `prepare` returns steps the
engine, and clipping is noted and done in the next step. Everything else (data, accumulation,
schedulers, trackers, files) is Accelerate's.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from roundpipe import RoundPipe, StepHandle
from roundpipe.engine.base import Engine
from roundpipe.errors import ConfigError
from roundpipe.optim.state import is_owned

from .engine.optimizer import PendingNorm, PipelineOptimizer, is_over_masters


class RoundPipeAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """`accelerate.Accelerator` whose `prepare` also takes engines, and optimizers over their
    parameters.

    Outputs of an engine's forward are backpropagated through (`backward`), gradients accumulate
    until the step (`accumulate`), clipping works on ``engine.parameters()``, states are saved and
    loaded with the optimizer's copies of the weights. Updates are synchronous. Takes all arguments
    of `Accelerator` but those that place or cast models.

    Of several processes, as `accelerate launch` and `torchrun` start them, each makes its
    accelerator first, and then the engine with ``process_group=torch.distributed.group.WORLD``.
    Gradients are averaged over them, as `DistributedDataParallel` does, and all call ``save_state``
    and ``load_state``; the files are those of one process.

    Raises:
        ConfigError: mixed precision.

    Example:
        >>> accelerator = RoundPipeAccelerator(gradient_accumulation_steps=2)
        >>> engine = wrap_model_to_roundpipe(model, optim_dtype=torch.float32)
        >>> optimizer = torch.optim.AdamW(engine.optim_parameters())
        >>> engine, optimizer, batches = accelerator.prepare(engine, optimizer, batches)
        >>> for batch in batches:
        ...     with accelerator.accumulate(engine):
        ...         accelerator.backward(engine(**batch).loss)
        ...         if accelerator.sync_gradients:
        ...             norm = accelerator.clip_grad_norm_(engine.parameters(), 1.0)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"device_placement": False, **kwargs})
        if self.mixed_precision != "no":
            raise ConfigError(
                f"mixed_precision={self.mixed_precision!r}: Accelerate would patch the engine's "
                "forward; load the "
                "model in bfloat16 with optim_dtype=torch.float32, or call the engine within "
                "torch.autocast"
            )
        self._engines: list[Engine] = []

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as Accelerate does; an engine and the optimizer over its parameters come in one
        call."""
        self._engines += [
            given for given in args if isinstance(given, Engine) and given not in self._engines
        ]
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Leaves an engine as it is, and prepares any other model as ever.

        Raises:
            ConfigError: the engine is of another number of processes.
        """
        if not isinstance(model, Engine):
            return super().prepare_model(model, *args, **kwargs)  # type: ignore[no-any-return]
        if model.ranks.count != self.num_processes:
            raise ConfigError(
                f"the engine is of {model.ranks.count} processes, and the accelerator of "
                f"{self.num_processes}: make the engine after the accelerator, with "
                "process_group=torch.distributed.group.WORLD where there are several"
            )
        if model not in self._models:
            self._models.append(model)
            self.register_for_checkpointing(_Masters(model))
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Has an optimizer over an engine's copies of the weights stepped by that engine from here
        on.

        Raises:
            ConfigError: there is an engine, and the optimizer is over other parameters.
        """
        engine = next(
            (one for one in self._engines if is_over_masters(optimizer, _as_roundpipe(one))), None
        )
        if engine is not None and not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = PipelineOptimizer(
                _as_roundpipe(engine), optimizer, _AtOnce(), is_async=False
            )
        elif engine is None and self._engines:
            raise ConfigError(
                f"{type(optimizer).__name__} is not over the engine's parameters, which are copies "
                "of the model's: "
                "make it over engine.optim_parameters() and prepare it together with the engine"
            )
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Saves as Accelerate does, on the first process what all of them own.

        Raises:
            ConfigError: each node is to write, and only the first process has all of it.
        """
        if self.num_processes > 1 and self.project_configuration.save_on_each_node:
            raise ConfigError(
                "save_on_each_node: the first process gathers the optimizer's state and writes it; "
                "leave it out"
            )
        with ExitStack() as gathered:
            for optimizer in self._pipeline_optimizers():
                gathered.enter_context(optimizer.gathered())
            folder: str = super().save_state(*args, **kwargs)
            return folder

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: int | float = 2) -> Any:
        """Clips the gradients of the next step. The norm, before clipping, is known after it:
        ``.item()`` then.

        Raises:
            ConfigError: a ``norm_type`` other than 2, or ``parameters`` that are some of an
                engine's only.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = self._optimizer_of(given)
        if optimizer is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigError(
                f"norm_type={norm_type}: an engine's gradients are clipped by their 2-norm"
            )
        optimizer.max_grad_norm = float(max_norm)
        return PendingNorm(optimizer)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips each element as Accelerate does, of parameters that are no engine's.

        Raises:
            ConfigError: they are an engine's, whose gradients are on their way.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self._optimizer_of(given) is not None:
            raise ConfigError(
                "clip_grad_value_: an engine's gradients can only be clipped by their norm"
            )
        super().clip_grad_value_(given, clip_value)

    def _optimizer_of(self, parameters: Iterable[torch.Tensor]) -> PipelineOptimizer | None:
        """The optimizer of the engine whose parameters these are, all that train.

        Raises:
            ConfigError: they are some of an engine's only, or no optimizer of that engine was
                prepared.
        """
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        for engine in self._engines:
            own = {
                id(parameter) for parameter in engine.model.parameters() if parameter.requires_grad
            }
            if not given & own:
                continue
            prepared = self._pipeline_optimizers()
            optimizer = next((one for one in prepared if one.engine is engine), None)
            if optimizer is None or given != own:
                raise ConfigError(
                    "the gradients of an engine are clipped all together, in its optimizer's step: "
                    "prepare the "
                    "optimizer, and pass engine.parameters()"
                )
            return optimizer
        return None

    def _pipeline_optimizers(self) -> list[PipelineOptimizer]:
        prepared = [one.optimizer for one in self._optimizers]
        return [one for one in prepared if isinstance(one, PipelineOptimizer)]


def _as_roundpipe(engine: Engine) -> RoundPipe:
    """An AutoRoundPipe is the same to an optimizer."""
    return cast(RoundPipe, engine)


class _AtOnce:
    """Steps when told to."""

    def hand_over(self, optimizer: PipelineOptimizer) -> StepHandle:
        return optimizer.submit({})

    def stepped(self, optimizer: PipelineOptimizer) -> None:
        optimizer.max_grad_norm = 0.0  # because it was asked for that step only


class _Masters:
    """An engine's own copies of the weights, where they hold more than the weights. Saved as a
    custom object."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All processes call it; the first has those of all, the others their own."""
        own = {name: master.detach() for name, master in self._finer().items()}
        found = self._engine.ranks.gathered(own, None)
        return own if found is None else found[0]

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Comes after the weights, which it must be of."""
        masters = self._finer()
        others = {name for name, one in self._engine.optim_named_parameters() if not is_owned(one)}
        if masters.keys() != state.keys() - others:
            raise ConfigError(
                f"the state holds copies of {len(state.keys() - others)} weights, {len(masters)} "
                "are wanted; load it with the same trainable parameters, dtype and optim_dtype"
            )
        with torch.no_grad():
            for name, master in masters.items():
                master.copy_(state[name])

    def _finer(self) -> dict[str, nn.Parameter]:
        """Those that another process owns are not."""
        self._engine.synchronize()
        weights = dict(self._engine.model.named_parameters())
        masters = self._engine.optim_named_parameters()
        return {name: master for name, master in masters if master.dtype != weights[name].dtype}
