"""The engine of a trainer: built when first needed, kept while the model stays the same, replaced when it changes.

Lazily, because a model is not final when Trainer is constructed: PEFT wraps it, embeddings are resized, `model_init`
makes a new one for every run.
"""

import time
from typing import Any

from torch import nn
from transformers import TrainingArguments

from roundpipe import RoundPipe
from roundpipe.wrap import wrap_model_to_roundpipe

from .arguments import engine_devices, pipeline_of
from .refusals import refuse_model

Fingerprint = tuple[tuple[nn.Parameter, bool], ...]


class EngineSlot:
    """Holds at most one engine. Used by the user's thread only."""

    def __init__(self, engine: RoundPipe | None = None) -> None:
        self._engine = engine
        self._owns_engine = engine is None
        self._seen = None if engine is None else _fingerprint(engine.model)
        self.build_seconds = 0.0

    @property
    def current(self) -> RoundPipe | None:
        return self._engine

    def engine_for(self, model: nn.Module, args: TrainingArguments) -> RoundPipe:
        """The engine of ``model``; the one before is closed if it was made for another state of the model."""
        if not self._fits(model):
            self._replace(model, args)
        assert self._engine is not None
        return self._engine

    def reload(self, model: nn.Module) -> None:
        """Weights were loaded into ``model``: the engine's copies follow, unless the next use rebuilds it anyway."""
        if self._engine is not None and self._fits(model):
            self._engine.reload_parameters()

    def _fits(self, model: nn.Module) -> bool:
        return self._engine is not None and self._engine.model is model and _is_same(self._seen, _fingerprint(model))

    def _replace(self, model: nn.Module, args: TrainingArguments) -> None:
        refuse_model(model)
        if self._engine is not None and self._owns_engine:
            self._engine.close()  # first, because its pinned memory is what the next one needs
        self._engine = None
        started = time.perf_counter()
        self._engine = _build(model, args)
        self._owns_engine = True
        self.build_seconds = time.perf_counter() - started
        self._seen = _fingerprint(model)


def _build(model: nn.Module, args: TrainingArguments) -> RoundPipe:
    pipeline = pipeline_of(args)
    return wrap_model_to_roundpipe(
        model,
        optim_dtype=pipeline.master_dtype(),
        devices=engine_devices(args),
        pin_model=pipeline.pin_model,
        max_gpu_memory=pipeline.max_gpu_memory,
        model_run_config=pipeline.run_config(),
        name=type(model).__name__,
    )


def _fingerprint(model: nn.Module) -> Fingerprint:
    """Which parameter objects there are and which train: what an engine lays out once."""
    return tuple((parameter, parameter.requires_grad) for parameter in model.parameters())


def _is_same(seen: Fingerprint | None, now: Fingerprint) -> bool:
    if seen is None or len(seen) != len(now):
        return False
    return all(a is b and trains == trained for (a, trains), (b, trained) in zip(seen, now, strict=True))


def runs_by_preset(engine: RoundPipe) -> bool:
    """Whether the engine's own rules merge the outputs of microbatches: a preset's merge the loss exactly."""
    return engine.statistics()["layers"] > 1 and not isinstance(engine.model, nn.Sequential)


def stop_checkpointing(model: Any) -> None:
    """Trainer turns activation checkpointing on at every `train()`; the engine recomputes already."""
    if getattr(model, "is_gradient_checkpointing", False):
        model.gradient_checkpointing_disable()
