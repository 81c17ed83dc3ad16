"""Whether anybody may look at the model's weights between an update and the next use of the engine.

A synchronous step publishes to the model behind the caller's back, while the next round's first stages already go up;
whatever the engine does itself waits layer by layer, and evaluation and saving wait for all of it. So the step is only
made to wait where code that is not ours or Hugging Face's comes in between.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .mixin import RoundPipeTrainerMixin

# Callbacks of transformers read weights only while saving; some of TRL's do at every step.
_CALLBACKS, _TRAINERS = ("transformers.",), ("transformers.", "trl.", "roundpipe_hf.")
# What Trainer calls after the step and before the next round, besides callbacks.
_BETWEEN = ("training_step", "get_batch_samples", "log", "_maybe_log_save_evaluate", "floating_point_ops")


def reads_weights(trainer: "RoundPipeTrainerMixin") -> bool:
    """Whether a callback, or an override of a method called between steps, is somebody else's."""
    if not all(_comes_from(type(callback), _CALLBACKS) for callback in trainer.callback_handler.callbacks):
        return True
    owners = [cls for cls in type(trainer).__mro__ if any(name in vars(cls) for name in _BETWEEN)]
    return not all(_comes_from(cls, _TRAINERS) for cls in owners) or any(name in vars(trainer) for name in _BETWEEN)


def _comes_from(cls: type, packages: tuple[str, ...]) -> bool:
    return f"{cls.__module__}.".startswith(packages)
