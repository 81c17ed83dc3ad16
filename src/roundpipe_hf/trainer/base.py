"""`transformers.Trainer` over the pipeline engine."""

from transformers import Trainer

from .mixin import RoundPipeTrainerMixin


class RoundPipeTrainer(RoundPipeTrainerMixin, Trainer):
    """`transformers.Trainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same results. Settings of the engine come from
    `RoundPipeTrainingArguments`; a plain `TrainingArguments` uses their defaults.

    Example:
        >>> args = RoundPipeTrainingArguments("out", bf16=True)
        >>> trainer = RoundPipeTrainer(model, args, train_dataset=dataset)
        >>> trainer.train()
    """
