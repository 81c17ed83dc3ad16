"""Every name of transformers, accelerate and PEFT that is private or known to move. A new release
breaks here first."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from peft import PeftMixedModel, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.core_model_loading import dot_natural_key as natural_order
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import _add_variant as add_variant
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, unwrap_peft_model
from transformers.training_args import OptimizerNames

from roundpipe.errors import ConfigError
from roundpipe.presets.experts.routing import wants_auxiliary_loss

__all__ = [
    "OPTIMIZER_NAME",
    "PREFIX_CHECKPOINT_DIR",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "TRAINER_STATE_NAME",
    "AuxiliaryTrainingWrapper",
    "BaseTunerLayer",
    "OptimizerNames",
    "TrainableTokensWrapper",
    "WeightConverter",
    "WeightRenaming",
    "adapter_configs",
    "add_variant",
    "adds_router_loss",
    "base_model",
    "before_merging",
    "book_loss",
    "clear_device_cache",
    "convert_to_fp32",
    "disable_checkpointing",
    "get_model_conversion_mapping",
    "is_optimizer_factory",
    "loss_adds_up",
    "model_class_of",
    "natural_order",
    "note_rows",
    "refuse_multiplied",
    "rename_source_key",
    "returns_loss",
    "rotate_checkpoints",
    "should_reduce_batch_size",
    "tell_skipped",
    "use_one_gpu",
    "valid_targets",
    "will_log",
]


def base_model(model: nn.Module) -> Any:
    """The model under a PEFT wrapper, or ``model`` itself."""
    return unwrap_peft_model(model)


def disable_checkpointing(model: nn.Module) -> None:
    """Later releases have another name for it, and warn of the one that earlier releases know."""
    name = "activation_checkpointing_disable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_disable")()


def adapter_configs(model: Any) -> Mapping[str, Any]:
    """PEFT configs by adapter name; none for a model without adapters."""
    return model.peft_config if isinstance(model, PeftModel | PeftMixedModel) else {}


def before_merging(model: Any, check: Callable[[nn.Module], None]) -> None:
    """Has PEFT call ``check`` with its tuner before it merges or takes out the first module. Does
    nothing to a model without adapters."""
    if adapter_configs(model):
        tuner = model.base_model
        # Not a closure, because models are pickled and copied.
        tuner._check_merge_allowed = partial(_checked_first, tuner, check)


def _checked_first(tuner: Any, check: Callable[[nn.Module], None]) -> None:
    check(tuner)
    type(tuner)._check_merge_allowed(tuner)


def model_class_of(model_or_auto_class: Any, config: Any) -> Any:
    """The model's class: that which an auto class chooses for the config."""
    mapping = getattr(model_or_auto_class, "_model_mapping", None)
    if mapping is None:
        return model_or_auto_class
    if type(config) not in mapping:
        raise ConfigError(
            f"{model_or_auto_class.__name__} has no class for {type(config).__name__}; say "
            "model_class"
        )
    return mapping[type(config)]


def use_one_gpu(args: TrainingArguments) -> None:
    """Keeps Trainer from multiplying the batch by the number of GPUs and from building
    `nn.DataParallel`."""
    # Because the property sets `_n_gpu` on its first read and would undo ours.
    args.device  # noqa: B018
    args._n_gpu = min(args._n_gpu, 1)


def loss_adds_up(trainer: Trainer) -> bool:
    """Whether the losses of microbatches, each divided by the window's number of targets, are known
    to add up.

    True for label smoothing, and for the models whose own loss is transformers' causal one.
    """
    if trainer.label_smoother is not None:
        return True
    assert isinstance(trainer.model, nn.Module)
    model = base_model(trainer.model)
    return makes_causal_loss(model)


def adds_router_loss(model: nn.Module, asked: bool | None = None) -> bool:
    """Whether the model's own loss has a part that is of all rows of a batch together.

    ``asked``: ``output_router_logits`` of a call, which beats the config where it says something.
    """
    base = base_model(model)
    return wants_auxiliary_loss(type(base), getattr(base, "config", None), asked)


def makes_causal_loss(model: nn.Module) -> bool:
    """Says whether the model's own loss is transformers' for causal language models.

    Encoders with a decoder, and some decoders, have that function by the name of their class, and a
    forward that makes the loss without it: of the labels as they are, whatever it is to divide by.
    """
    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return False
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def valid_targets(trainer: Trainer, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Which labels are predictions that count, as `Trainer._get_num_items_in_batch` sees it; None
    without labels that name a class."""
    labels = inputs.get("shift_labels")
    if labels is None:
        labels = inputs.get("labels")
        if isinstance(labels, torch.Tensor) and trainer._loss_shifts_labels:
            labels = labels[..., 1:]
    return (
        labels.ne(-100)
        if isinstance(labels, torch.Tensor) and not labels.is_floating_point()
        else None
    )


def returns_loss(trainer: Trainer, inputs: Any) -> bool:
    """Whether `prediction_step` would compute a loss of ``inputs``, which TRL's rollouts begin with
    as a list of prompts."""
    if not isinstance(inputs, Mapping):
        return False
    names = trainer.label_names
    if len(names) > 0:
        return all(inputs.get(name) is not None for name in names)
    asked = inputs.get("return_loss")
    return bool(trainer.can_return_loss if asked is None else asked)


def tell_skipped(optimizer: Any, was_skipped: bool) -> None:
    """Lets `Accelerator.optimizer_step_was_skipped` know, which Trainer asks before it moves its
    scheduler."""
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer._is_overflow = was_skipped


def will_log(trainer: Trainer) -> bool:
    """Whether `_maybe_log_save_evaluate` is about to log."""
    return (
        trainer.control.should_log and trainer.state.global_step > trainer._globalstep_last_logged
    )


def refuse_multiplied(error: TypeError) -> None:
    """Raises where Trainer has stumbled over what `compute_loss_func` returned, which it multiplies
    before anybody else sees it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = None if traceback is None else traceback.tb_frame
    if frame is None or frame.f_code is not Trainer.compute_loss.__code__:
        return
    if "loss" in frame.f_locals and not isinstance(frame.f_locals["loss"], torch.Tensor):
        raise ConfigError(
            f"compute_loss_func returned a {type(frame.f_locals['loss']).__name__}; it must be a "
            "tensor"
        ) from error


def note_rows(trainer: Trainer, inputs: Mapping[str, Any]) -> None:
    """Tells Accelerate how many rows the last batch of a data set without a length has: its loss
    counts once for each.

    Accelerate counts them itself only where it dispatches batches, which unless told it does where
    it puts them on a device, and takes the batch for a full one else.
    """
    if trainer.accelerator.dispatch_batches is False:
        return
    state: Any = trainer.accelerator.gradient_state
    # Not if the user evaluates with a loader that was not prepared, when it still is the
    # training's.
    is_evaluated = state.active_dataloader is trainer.callback_handler.eval_dataloader
    if is_evaluated and state.end_of_dataloader and state.remainder == -1:
        state.active_dataloader.remainder = find_batch_size(inputs) or -1


def divisor_of_losses(trainer: Trainer, num_items: torch.Tensor | int | None) -> int:
    """Returns what Trainer divides a batch's loss by. Not one that is scaled: since transformers
    5.19 its class may say that; where it does not, one that was given the number of items."""
    is_asked = hasattr(Trainer, "loss_is_scaled_for_ga")
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None) if is_asked else None
    if is_scaled is None:
        is_divided = trainer.model_accepts_loss_kwargs and num_items is not None
        is_scaled = is_divided or trainer.compute_loss_func is not None
    return 1 if is_scaled else trainer.current_gradient_accumulation_steps


def book_loss(trainer: Trainer, loss: torch.Tensor) -> None:
    """Counts a loss as `_run_epoch` counts what `training_step` returns, its filter for nan and inf
    included."""
    if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        trainer._tr_loss += trainer._tr_loss / steps
    else:
        trainer._tr_loss += loss
