"""What lies under a PEFT wrapper, and which adapters a sequence of the base's own blocks reproduces
exactly."""

import sys
from typing import Any

from torch import nn

from ..errors import ConfigError


def base_of(model: nn.Module) -> nn.Module:
    """The model a PEFT wrapper holds, or ``model`` itself.

    Adapters such as LoRA replace modules *inside* the base, so calling the base's blocks is all
    that the wrapper's forward does. Adapters that do more there are refused.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    tuner: Any = model.base_model
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            raise _refused(
                config,
                "it changes the inputs of the whole model; use LoRA or another adapter of weights",
            )
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise _refused(
                config, "activated LoRA needs offsets computed from the whole batch; use plain LoRA"
            )
        if config.peft_type.value == "LILY":
            raise _refused(
                config,
                "its router averages over all rows of a batch, which microbatches are not; use "
                "LoRA",
            )
    from peft.tuners.tuners_utils import BaseTuner

    if type(tuner).forward is not BaseTuner.forward:
        raise _refused(
            model.active_peft_config, f"{type(tuner).__name__} has a forward of its own; use LoRA"
        )
    base: nn.Module = tuner.model
    return base


def _refused(config: Any, why: str) -> ConfigError:
    return ConfigError(
        f"adapter type {config.peft_type.value} cannot run through the pipeline: {why}"
    )
