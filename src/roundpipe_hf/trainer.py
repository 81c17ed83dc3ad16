"""`Trainer` with its training step, optimizer, evaluation and saving handed to the pipeline engine.

`trainer.model` stays the Hugging Face model; the engine is only `trainer.model_wrapped`. Everything else of Trainer is
inherited: loop, callbacks, schedulers, data, logging, files.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer

from roundpipe import RoundPipe, RoundPipeRunConfig

from . import compat
from .arguments import device_type_of, pipeline_of
from .checkpointing import load_masters, save_masters
from .engine import EngineSlot, stop_checkpointing
from .loss_rule import ADDS_UP, KEEP_WHOLE, Evaluated, LossRule, MeanOver, learn_rule
from .optimizer import PendingNorm, PipelineOptimizer, adopt
from .refusals import refuse_arguments, refuse_model, refuse_optimizer
from .replay import EngineStandIn, ModelCall, record_call
from .round import RoundLoss, StashedBatch, cut_window, parts_of

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


class RoundPipeTrainerMixin(_Base):
    """Put it before a Trainer class among the bases: ``class MyTrainer(RoundPipeTrainerMixin, Trainer)``."""

    def __init__(self, model: Any = None, *args: Any, **kwargs: Any) -> None:
        given = model if isinstance(model, RoundPipe) else None
        self._slot = EngineSlot(given)
        self._stash: list[StashedBatch] = []
        self._rule: LossRule | None = None
        self._calls: dict[tuple[str, ...], ModelCall] = {}
        super().__init__(model if given is None else given.model, *args, **kwargs)
