"""The Hugging Face side: `Trainer` with its training step handed to the engine. Translates, decides
nothing."""

from .arguments import PipelineArguments, RoundPipeTrainingArguments
from .loading import load_pretrained, load_pretrained_mmap
from .loss.reduction import loss_reduction
from .trainer.base import RoundPipeTrainer
from .trainer.mixin import RoundPipeTrainerMixin

__all__ = [
    "PipelineArguments",
    "RoundPipeTrainer",
    "RoundPipeTrainerMixin",
    "RoundPipeTrainingArguments",
    "load_pretrained",
    "load_pretrained_mmap",
    "loss_reduction",
]
