"""The Hugging Face side: `Trainer` with its training step handed to the engine. Translates, decides nothing."""

from .arguments import PipelineArguments, RoundPipeTrainingArguments
from .trainer import RoundPipeTrainer, RoundPipeTrainerMixin

__all__ = ["PipelineArguments", "RoundPipeTrainer", "RoundPipeTrainerMixin", "RoundPipeTrainingArguments"]
