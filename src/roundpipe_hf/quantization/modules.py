"""Models that transformers has loaded through bitsandbytes: the same bytes as weights that the
engine can stage."""

from typing import Any

import torch
from torch import nn

from roundpipe.errors import ConfigError
from roundpipe.quantized import NF4, QuantizedWeight

from ..compat import BaseTunerLayer
from .reading import named_nf4


class QuantizedLinear(nn.Linear):
    """A linear layer that computes in ``compute_dtype`` and answers in the dtype of its input, as
    bitsandbytes' ``Linear4bit`` does. None: it computes in the dtype of its input."""

    compute_dtype: torch.dtype | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Args: a tensor of shape (..., in_features). Returns (..., out_features)."""
        dtype = self.compute_dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        output = nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)
        return output.to(input.dtype)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Puts in what bitsandbytes would, because the model's config says that it is quantized,
        and whoever loads a file by that config looks for the parts of its weights."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination.get(f"{prefix}weight")
        # Who keeps variables asks for parameters.
        if isinstance(weight, QuantizedWeight) and not keep_vars:
            destination.update(named_nf4(f"{prefix}weight", weight))


def adopt_bitsandbytes(model: nn.Module) -> None:
    """Turns every ``Linear4bit`` of the model into a `QuantizedLinear` over the same memory.

    In place, as it stands in whatever holds it: a block, or an adapter's ``base_layer``.

    Raises:
        ConfigError: one that is not NF4, is on a device, or was repacked for its CPU. Nothing is
            changed.
    """
    # By name, because bitsandbytes is nobody's dependency who does not use it; and by package,
    # because PEFT's layers around it have the same name.
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
        and type(module).__module__.startswith("bitsandbytes.")
    }
    weights = {name: _weight(name, module) for name, module in found.items()}
    for name, module in found.items():
        module._parameters["weight"] = nn.Parameter(weights[name], requires_grad=False)
        module.__dict__.pop("quant_state", None)  # because it would keep the parts alive elsewhere
        module.compute_dtype = module.compute_dtype if module.compute_type_is_set else None
        # The class, not the module, because adapters, hooks and tied layers hold the module.
        module.__class__ = QuantizedLinear


def refuse_merging(tuner: nn.Module) -> None:
    """Raises ConfigError if one of the adapters is over a quantized weight, before the first module
    is merged: those that PEFT meets earlier, embeddings for example, would be the adapter's no
    longer, and be missing from what is saved of it."""
    for name, module in tuner.named_modules():
        if isinstance(module, BaseTunerLayer):
            base: nn.Module = module.get_base_layer()
            if any(isinstance(one, QuantizedWeight) for one in base.parameters(recurse=False)):
                raise ConfigError(
                    f"the weights of {name} are quantized, and cannot take an adapter in. Save the "
                    "adapter, with trainer.save_model(folder) for example, and merge it with "
                    "roundpipe_hf.merge_and_save(folder, base, out); unload() takes it away"
                )


def _weight(name: str, module: Any) -> QuantizedWeight:
    packed, state = module.weight.data, module.weight.quant_state
    if state is None or state.quant_type != "nf4":
        kind = None if state is None else state.quant_type
        raise ConfigError(f"{name} is quantized as {kind!r}; load the model with 'nf4'")
    if packed.device.type != "cpu":
        raise ConfigError(
            f"{name} is on {packed.device}; load the model with device_map={{'': 'cpu'}}"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(
            f"{name} was repacked by bitsandbytes for a forward on this CPU; load the model again"
        )
    parts, form = [packed, state.absmax, state.code], NF4(state.blocksize)
    if state.nested:
        inner = state.state2
        parts = [packed, state.absmax, state.code, inner.code, inner.absmax]
        form = NF4(state.blocksize, inner.blocksize, float(state.offset))
    try:
        return QuantizedWeight(form, parts, state.shape, state.dtype)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
