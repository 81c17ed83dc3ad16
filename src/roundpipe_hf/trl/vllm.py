"""Weights for vLLM, where it makes the rollouts.

[Note: merged temporaries] TRL merges adapters into the model, sends its parameters, and takes the
adapters out again. Here the bases may be mapped files, or shared, and devices copy from them at any
time, so nobody writes to them: each layer that has an adapter is merged in a copy, which is dropped
before the next one is made. What arrives is the same to the bit.
"""

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import TrainingArguments

from roundpipe.engine.generation import sharing, value_on
from roundpipe.errors import ConfigError
from roundpipe.quantized import QuantizedWeight

from ..arguments import engine_devices
from ..compat import adapter_configs
from .compat import feed_vllm, vllm_name


def send_merged_weights(trainer: Any, generation: Any) -> None:
    """TRL's ``generation`` (a `VLLMGeneration`) gets the newest weights of ``trainer``'s model. See
    [Note: merged temporaries]."""
    weights = functools.partial(_named_weights, weakref.ref(trainer), weakref.ref(generation))
    feed_vllm(generation, weights)


def _named_weights(trainer: Any, generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
    trainer, generation = trainer(), generation()
    trainer.synchronize()
    device = generation.accelerator.device
    for name, weight in merged_weights(trainer.model, device):
        prefixes = ["modules_to_save.default."] if adapter_configs(trainer.model) else []
        yield vllm_name(generation, name, prefixes), weight


@torch.no_grad()
def merged_weights(model: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Names, as in the model without adapters, and weights on ``device``, with the active adapters
    in them. A weight is valid until the next one is asked for."""
    layers = _adapted_layers(model)
    merged: Any = None
    found: dict[nn.Parameter, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if layers is not None:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if model.prefix in name or "original_module" in name:
                continue
        layer = None if layers is None else layers.get(parameter)
        if layer is None:
            yield name, _dense_on(parameter, device)
            continue
        if layer is not merged:
            found.clear()
            merged, found = layer, _merged(layer, device)
        yield name, found[parameter]


def _adapted_layers(model: nn.Module) -> dict[nn.Parameter, Any] | None:
    """The layer with adapters that a weight of the base belongs to; None for a model without."""
    if not adapter_configs(model):
        return None
    found: dict[nn.Parameter, Any] = {}
    for module in model.modules():  # from outside to inside: one adapter may be around another
        if isinstance(module, BaseTunerLayer):
            for parameter in module.get_base_layer().parameters():
                found.setdefault(parameter, module)
    return found


def _merged(layer: Any, device: torch.device) -> dict[nn.Parameter, torch.Tensor]:
    """The weights of a merged copy of ``layer``, by those of the layer itself."""
    made: Any = sharing(layer)
    base = set(made.get_base_layer().parameters())
    for parameter in made.parameters():
        parameter.data = value_on(parameter, device, copy=parameter in base)
    for module in made.modules():
        if isinstance(module, BaseTunerLayer):
            # PEFT's layers over four bits would quantize what they merge, and the copy is dense.
            is_over_bits = type(module).__module__ == "peft.tuners.lora.bnb"
            merge: Any = LoraLinear.merge if is_over_bits else type(module).merge
            merge(module)
    return dict(zip(layer.parameters(), (one.detach() for one in made.parameters()), strict=True))


def _dense_on(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    if isinstance(parameter, QuantizedWeight):
        return parameter.dequantize_on(device)
    return parameter.detach().to(device)


def refuse_shared_device(trainer: str, args: TrainingArguments) -> None:
    """Raises ConfigError where vLLM would run inside of this process, on a device of the engine's:
    each plans with all memory that is free, and vLLM keeps what it takes."""
    if getattr(args, "vllm_mode", None) == "colocate":
        own, given = args.device, engine_devices(args)
        if not isinstance(given, list) and own.type != "cpu":
            count = given or torch.get_device_module(own).device_count()
            given = [torch.device(own.type, index) for index in range(count)]
        refuse_among(trainer, own, given if isinstance(given, list) else [])


def refuse_among(trainer: str, own: torch.device, devices: list[torch.device]) -> None:
    """Raises ConfigError if ``own``, where vLLM runs in colocate mode, is among ``devices``."""
    if own.type != "cpu" and own in devices:
        others = ",".join(str(one) for one in devices if one != own) or f"{own.type}:1"
        raise ConfigError(
            f"{trainer} does not support use_vllm with vllm_mode='colocate' on {own}, where the "
            "engine computes as well: both plan with all memory that is free there. Use "
            f"vllm_mode='server', give the engine other devices (devices={others!r}), or leave "
            "use_vllm out: rollouts are then generated by the engine"
        )
