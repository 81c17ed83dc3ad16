"""`transformers.Trainer` over the pipeline engine."""

from transformers import Trainer

from .mixin import RoundPipeTrainerMixin


class RoundPipeTrainer(RoundPipeTrainerMixin, Trainer):
    """`transformers.Trainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same results. Settings of the engine come from
    `RoundPipeTrainingArguments`; a plain `TrainingArguments` uses their defaults. ``model`` may be
    a model in host memory, its name or folder, or an engine that `wrap_model_to_roundpipe` made.

    Raises:
        ConfigError: arguments, a model or an optimizer that the pipeline cannot honour, such as
            DeepSpeed, FSDP, quantized weights or an optimizer over the model's own parameters.

    Example:
        >>> args = RoundPipeTrainingArguments("out", bf16=True)
        >>> trainer = RoundPipeTrainer(model, args, train_dataset=dataset)
        >>> trainer.train()
    """
