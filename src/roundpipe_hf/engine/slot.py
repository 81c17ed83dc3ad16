"""The engine of a trainer: built when first needed, kept while the model stays the same, replaced
when it changes.

Lazily, because a model is not final when Trainer is constructed: PEFT wraps it, embeddings are
resized, `model_init` makes a new one for every run.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from roundpipe import RoundPipe
from roundpipe.engine.generation import is_checkpointing
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.layers.structure import Structure
from roundpipe.presets.preset import has_causal_preset

from ..arguments import PipelineArguments, engine_devices, pipeline_of
from ..compat import base_model, disable_checkpointing
from .calls import num_layers
from .refusals import refuse_model

logger = logging.getLogger(__name__)


class Laid(NamedTuple):
    """What an engine lays out once about a parameter. Resizing embeddings keeps the object and
    changes its shape."""

    parameter: nn.Parameter
    is_trained: bool
    dtype: torch.dtype
    shape: torch.Size


class Layout(NamedTuple):
    """What an engine is made over."""

    structure: Structure
    parameters: list[Laid]

    @classmethod
    def of(cls, model: nn.Module) -> "Layout":
        structure = Structure([model])
        return cls(
            structure, [Laid(p, p.requires_grad, p.dtype, p.shape) for p in structure.parameters]
        )

    def is_current(self, *, trains: bool) -> bool:
        """Whether the model still is laid out so. ``trains``: whether it matters which parameters
        train."""
        return not self.structure.has_changed() and not (
            trains and any(one.parameter.requires_grad != one.is_trained for one in self.parameters)
        )

    def versions(self) -> list[int]:
        """How often each parameter was written to."""
        return [one.parameter._version for one in self.parameters]

    def first_change(self, now: "Layout", names: Sequence[str]) -> str:
        """The first thing that differs, in words. ``names`` are those of the parameters here."""
        for name, a, b in zip(names, self.parameters, now.parameters, strict=False):
            if a.shape != b.shape:
                return f"parameter {name!r} had the shape {tuple(a.shape)} and has {tuple(b.shape)}"
            if a.dtype is not b.dtype:
                return f"parameter {name!r} was {a.dtype} and is {b.dtype}"
            if a.parameter is not b.parameter:
                return f"parameter {name!r} was replaced by another"
            if a.is_trained != b.is_trained:
                return f"parameter {name!r} was {'un' * b.is_trained}frozen"
        counts = len(self.parameters), len(now.parameters)
        if counts[0] != counts[1]:
            return f"it had {counts[0]} parameters and has {counts[1]}"
        modules = len(self.structure.modules), len(now.structure.modules)
        return f"it had {modules[0]} modules and has {modules[1]}, or others"


class EngineSlot:
    """Holds at most one engine. Used by the user's thread only."""

    def __init__(self, engine: RoundPipe | None = None) -> None:
        self._engine = engine
        self._owns_engine = engine is None
        self._seen = None if engine is None else Layout.of(engine.model)
        self._versions = [] if self._seen is None else self._seen.versions()
        self._names: list[str] = []
        self._change = ""
        self._noted: dict[str, Any] = {}
        self.build_seconds = 0.0

    @property
    def current(self) -> RoundPipe | None:
        """None also where it was closed from outside, which only frees what it held: the next use
        builds another."""
        if self._engine is not None and self._owns_engine and self._engine.is_closed:
            self._engine = None
        return self._engine

    @property
    def is_given(self) -> bool:
        """Whether the engine is the user's own, which is theirs to configure and to close."""
        return not self._owns_engine

    def engine_for(
        self, model: nn.Module, args: TrainingArguments, *, trains: bool = True
    ) -> RoundPipe:
        """The engine of ``model``; the one before is closed if it was made for another state of the
        model.

        ``trains``: if not, it does not matter which parameters train, as while adapters are
        disabled.
        """
        if not self._fits(model, trains=trains):
            self._replace(model, args)
        assert self._engine is not None
        return self._engine

    def noted(self, what: str, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returned first for this engine."""
        if what not in self._noted:
            self._noted[what] = compute()
        return self._noted[what]

    def dtypes(self, model: nn.Module) -> set[torch.dtype]:
        """Of the parameters. While the model has an engine, of those that it was made over."""
        if self._seen is None or self.current is None or self.current.model is not model:
            return {parameter.dtype for parameter in model.parameters()}
        return {one.dtype for one in self._seen.parameters}

    def synchronize(self, model: nn.Module, *, is_in_run: bool) -> None:
        """Brings every update into the engine's model. An engine that ``model`` has grown out of
        since the last run, when adapters were merged, say, ends with that: the next use builds
        another."""
        if self.current is None:
            return
        if self.is_given or self._fits(model, trains=False):
            self.current.synchronize()
        elif is_in_run:
            self._note_change(model)
            raise self.changed_in_run()
        else:
            self.current.close()

    def reload(self, model: nn.Module) -> None:
        """Weights of ``model`` may have changed: the engine's copies follow, unless the next use
        rebuilds it anyway.

        The engine must be flushed, and have been so before they changed.
        """
        if self.current is not None and self._seen is not None and self._fits(model):
            self.current.reload_parameters()
            self._versions = self._seen.versions()

    def begin(self, model: nn.Module) -> None:
        """A run begins: anything may have been done to weights since the last one, which flushed if
        it ended well."""
        if self.current is not None and self._fits(model):
            self.current.synchronize()
            self.reload(model)

    def share(self, model: nn.Module) -> None:
        """Trainable weights and buffers of all processes become those of the first. Frozen weights
        are left in their files."""
        if self.current is not None and self.current.ranks.count > 1 and self._fits(model):
            trained = [one for one in model.parameters() if one.requires_grad]
            self.current.ranks.share([*trained, *model.buffers()])
            self.reload(model)

    def send_again(self) -> None:
        """Weights may have been written in a way that torch does not count: devices take them from
        the model again."""
        if self.current is not None:
            self.current.send_again()

    def rest(self) -> None:
        """No run is going on: what is dropped now, the trainer itself for example, can be
        collected."""
        if self.current is not None:
            self.current.rest()

    def follow_writes(self, model: nn.Module) -> None:
        """The same, only where somebody has written to weights in place; what went through
        ``.data`` is not seen.

        Writing back does not count as a write.
        """
        if self._seen is not None and self._seen.versions() != self._versions:
            self.reload(model)

    def _fits(self, model: nn.Module, *, trains: bool = True) -> bool:
        engine = self.current
        if engine is None or engine.model is not model or self._seen is None:
            return False
        return self._seen.is_current(trains=trains)

    def _replace(self, model: nn.Module, args: TrainingArguments) -> None:
        refuse_model(model)
        self._note_change(model)
        if self.current is not None and self._owns_engine:
            self.current.close()  # first, because its pinned memory is what the next one needs
        self._engine = None
        self._noted.clear()
        started = time.perf_counter()
        self._engine = _build(model, args)
        self._owns_engine = True
        self.build_seconds = time.perf_counter() - started
        self._seen = Layout.of(model)
        self._names = [name for name, _ in model.named_parameters()]
        self._versions = self._seen.versions()

    def _note_change(self, model: nn.Module) -> None:
        if self._seen is not None:
            self._change = self._seen.first_change(Layout.of(model), self._names)

    def changed_in_run(self) -> ConfigError:
        """The error for a model that is not what its engine and its optimizer were made for."""
        return ConfigError(
            "modules or parameters of the model were added, removed, replaced, cast, frozen or "
            "unfrozen during train(), which the optimizer cannot follow; do it before, or between "
            f"two calls of train(). The first change: {self._change}"
        )


def _build(model: nn.Module, args: TrainingArguments) -> RoundPipe:
    pipeline, devices = pipeline_of(args), engine_devices(args)
    run_config = pipeline.run_config()
    if run_config.num_microbatch is None and _cutting_gains_nothing(pipeline, devices):
        run_config = replace(run_config, num_microbatch=1)
    engine = wrap_model_to_roundpipe(
        model,
        optim_dtype=pipeline.master_dtype(),
        devices=devices,
        pin_model=pipeline.pin_model,
        max_gpu_memory=pipeline.max_gpu_memory,
        max_host_memory=pipeline.max_host_memory,
        optimizer_state_dir=pipeline.optimizer_state_dir,
        compute_dtype=pipeline.compute_dtype,
        cuda_graphs=pipeline.cuda_graphs,
        compile=args.torch_compile,
        process_group=dist.group.WORLD if args.world_size > 1 else None,
        model_run_config=run_config,
        name=type(model).__name__,
    )
    # Or an AutoRoundPipe, which is the same to a trainer but for losses that run fused.
    return cast(RoundPipe, engine)


def _cutting_gains_nothing(
    pipeline: PipelineArguments, devices: int | list[torch.device] | None
) -> bool:
    """True for one virtual device without a limit: there is no other device to keep busy, no copy
    to hide behind another microbatch's work, and its memory is the host's, where the plain Trainer
    has whole batches."""
    is_alone = isinstance(devices, list) and [device.type for device in devices] == ["cpu"]
    return is_alone and pipeline.max_gpu_memory is None


def runs_by_preset(engine: RoundPipe) -> bool:
    """Whether the engine's own rules merge the outputs of microbatches: a preset's merge the loss
    exactly."""
    return num_layers(engine) > 1 and not isinstance(engine.model, nn.Sequential)


def has_readable_head(model: nn.Module, engine: Any) -> bool:
    """Whether the engine's last layer answers calls with a ``readout``."""
    return has_causal_preset(model) and isinstance(engine, RoundPipe) and runs_by_preset(engine)


def stop_checkpointing(model: Any) -> None:
    """Trainer turns activation checkpointing on at every `train()`; the engine recomputes already.

    Each time, too, it adds a hook that makes the embeddings' output require a gradient, which only
    checkpointing needs.
    """
    if is_checkpointing(model):
        logger.info(
            "gradient_checkpointing=True: the engine recomputes already, see recompute_grain"
        )
        disable_checkpointing(model)
        base_model(model).disable_input_require_grads()
