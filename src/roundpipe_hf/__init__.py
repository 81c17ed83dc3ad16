"""The Hugging Face side: `Trainer` with its training step handed to the engine. Translates, decides
nothing."""

from .arguments import PipelineArguments, RoundPipeTrainingArguments
from .export.gguf import export_gguf
from .export.merging import merge_and_save
from .export.stacking import stack_experts
from .loading import load_pretrained, load_pretrained_mmap
from .loss.reduction import loss_reduction
from .trainer.base import RoundPipeTrainer
from .trainer.mixin import RoundPipeTrainerMixin
from .trainer.seq2seq import RoundPipeSeq2SeqTrainer, RoundPipeSeq2SeqTrainingArguments

__all__ = [
    "PipelineArguments",
    "RoundPipeSeq2SeqTrainer",
    "RoundPipeSeq2SeqTrainingArguments",
    "RoundPipeTrainer",
    "RoundPipeTrainerMixin",
    "RoundPipeTrainingArguments",
    "export_gguf",
    "load_pretrained",
    "load_pretrained_mmap",
    "loss_reduction",
    "merge_and_save",
    "stack_experts",
]
