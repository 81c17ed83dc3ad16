"""What RoundPipeTrainer does not do, said before anything is built: the option, the reason, what to
use instead."""

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe.quantized import QuantizedWeight

from ..arguments import pipeline_of
from ..compat import OptimizerNames, adapter_configs, is_optimizer_factory
from .optimizer import is_over_masters, why_not_moved

SUPPORTED_OPTIMIZERS = (
    OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_FUSED,
    OptimizerNames.SGD,
    OptimizerNames.ADAFACTOR,
    OptimizerNames.RMSPROP,
    OptimizerNames.ADAGRAD,
)

# Part of an optimizer's name -> why it cannot run over masters.
_WHY_NOT = {
    "galore": "it projects gradients through hooks on the model's own parameters",
    "apollo": "it projects gradients through hooks on the model's own parameters",
    "lomo": "it updates weights inside backward, before gradients exist as a whole",
    "schedule_free": "it swaps weights between training and evaluation",
    "8bit": "it keeps its state on a GPU, and the optimizer runs in host memory",
    "paged": (
        "it pages its state between host and GPU, and the optimizer runs in host memory already"
    ),
    "bnb": "it keeps its state on a GPU, and the optimizer runs in host memory",
}

logger = logging.getLogger(__name__)


def refuse_arguments(args: TrainingArguments) -> None:
    """Raises for the first training argument that the pipeline cannot honour."""
    for refusal in _refused_arguments(args):
        raise ConfigError(f"RoundPipeTrainer does not support {refusal}")


def refuse_model(model: nn.Module | None) -> None:
    """Raises for models whose forward is not the model's own layers in host memory. None: made
    later."""
    if model is not None:
        for refusal in _refused_model(model):
            raise ConfigError(f"RoundPipeTrainer does not support {refusal}")


def refuse_optimizer(
    args: TrainingArguments,
    optimizers: tuple[Any, Any],
    cls_and_kwargs: Any,
    engine: RoundPipe | None,
    model: nn.Module,
) -> None:
    """Raises for optimizers that would train nothing, or the wrong tensors.

    ``engine``: the one that the model came in, if it did. Without, an optimizer over parameters of
    ``model`` is moved to copies of them when there are some.
    """
    optimizer, scheduler = optimizers
    if optimizer is None and scheduler is not None:
        raise ConfigError(
            "optimizers=(None, scheduler): it would schedule another optimizer than the trainer's; "
            "set "
            "lr_scheduler_type, override create_scheduler, or pass the scheduler's optimizer too"
        )
    if optimizer is not None and (engine is None or not is_over_masters(optimizer, engine)):
        why_not = why_not_moved(optimizer, model)
        if why_not is not None:
            raise ConfigError(
                f"optimizers=({type(optimizer).__name__}, ...): the pipeline updates copies of the "
                f"model's parameters, and {why_not}. Pass optimizer_cls_and_kwargs=(cls, kwargs), "
                "or make it over the copies: engine = wrap_model_to_roundpipe(model, "
                "optim_dtype=torch.float32), an optimizer over engine.optim_parameters(), and "
                "RoundPipeTrainer(engine, args, optimizers=(optimizer, scheduler))"
            )
    if cls_and_kwargs is not None and is_optimizer_factory(cls_and_kwargs[0]):
        raise ConfigError(
            f"{cls_and_kwargs[0].__name__} builds its optimizer from the model's own parameters; "
            "the pipeline updates "
            "copies of them. Pass an optimizer class that takes parameter groups"
        )
    if optimizer is None and cls_and_kwargs is None:
        _refuse_optimizer_name(OptimizerNames(args.optim))


def _refuse_optimizer_name(name: OptimizerNames) -> None:
    if name in SUPPORTED_OPTIMIZERS:
        return
    why = next(
        (why for part, why in _WHY_NOT.items() if part in name.value),
        "nobody has tried it over the pipeline",
    )
    supported = ", ".join(repr(optimizer.value) for optimizer in SUPPORTED_OPTIMIZERS)
    raise ConfigError(
        f"RoundPipeTrainer does not support optim={name.value!r}: {why}. Use one of {supported}; "
        "or, with optimizer_cls_and_kwargs, one of roundpipe.optim: Lion, or LeanAdamW, whose "
        "state has fewer bits with {'moments': '8bit'}"
    )


def _refused_arguments(args: TrainingArguments) -> Iterator[str]:
    if args.deepspeed:
        yield (
            "deepspeed: it shards and offloads the same state the pipeline keeps in host memory; "
            "leave it out"
        )
    if args.fsdp:
        yield (
            "fsdp: the pipeline keeps no weights on the devices that could be sharded; leave it out"
        )
    if args.parallelism_config is not None:
        yield (
            "parallelism_config (tensor, context, ... parallel): devices are used stage by stage; "
            "leave it out"
        )
    if args.world_size > 1 and args.save_on_each_node:
        yield (
            "save_on_each_node: the first process gathers the state of the optimizer and writes "
            "it; leave it out"
        )
    if args.fp16 and pipeline_of(args).async_optimizer:
        yield (
            "fp16 with async_optimizer: whether a step overflowed is known too late for the "
            "scheduler; leave async_optimizer out, or where devices have bf16 use bf16=True or "
            "load the model in bfloat16"
        )
    if args.torch_compile and (args.torch_compile_backend, args.torch_compile_mode) != (
        "inductor",
        None,
    ):
        yield (
            f"torch_compile_backend={args.torch_compile_backend!r}, "
            f"torch_compile_mode={args.torch_compile_mode!r}: the engine compiles its blocks with "
            "torch.compile's defaults; set only torch_compile=True"
        )
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get(
        "fused_linear_cross_entropy", True
    ):
        yield (
            "use_liger_kernel with its fused loss: the pipeline computes the loss itself, without "
            "logits either; set "
            "liger_kernel_config={'fused_linear_cross_entropy': False}"
        )
    if DebugOption.UNDERFLOW_OVERFLOW in args.debug:
        yield (
            "debug='underflow_overflow': it knows modules by what they are, and devices run copies "
            "of them; leave it out, and set logging_nan_inf_filter=False to see the first loss "
            "that is no number"
        )
    dispatches = getattr(args.accelerator_config, "dispatch_batches", None)
    if dispatches and args.world_size == 1:
        logger.info("dispatch_batches: no effect in one process")
    elif dispatches:
        yield "dispatch_batches: batches stay in host memory until a stage needs them; leave it out"
    checkpointing: Any = args.gradient_checkpointing_kwargs or {}
    if getattr(args, "activation_offloading", False) or checkpointing.get("offload"):
        yield (
            "activation offloading: activations between stages are in host memory already; "
            "leave it out"
        )


def _refused_model(model: Any) -> Iterator[str]:
    device_map = getattr(model, "hf_device_map", None) or {}
    if any(str(device) != "cpu" for device in device_map.values()):
        yield (
            "a model dispatched by device_map: the pipeline places layers itself; "
            "load it with device_map=None"
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        yield (
            "a tensor-parallel model: the devices are used stage by stage; load it without tp_plan"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not any(
        isinstance(p, QuantizedWeight) for p in model.parameters()
    ):
        said = getattr(quantizer, "quantization_config", None)
        method = getattr(said, "quant_method", None)
        yield (
            f"weights that transformers holds quantized by {getattr(method, 'value', method)!r}: "
            "load the checkpoint with roundpipe_hf.load_pretrained, which reads 'fp8', 'mxfp4' and "
            "bitsandbytes' 'nf4', or load it dequantized"
        )
    for name, config in adapter_configs(model).items():
        if config.is_prompt_learning:
            yield (
                f"the prompt-learning adapter {name!r}: it changes the inputs of the whole model; "
                "use LoRA"
            )
