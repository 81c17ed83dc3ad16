"""``bf16=True`` on fp32 weights: autocast around the engine's work, as accelerate puts it around the model's forward.

The engine carries the caller's autocast into its workers, the loss function included. Trainer computes losses outside
of the model's autocast and on fp32 outputs, so both are restored there.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from .arguments import device_type_of
from .compat import convert_to_fp32


@dataclass(frozen=True, kw_only=True)
class Precision:
    device_type: str
    is_autocast: bool

    def in_model(self) -> contextlib.AbstractContextManager[Any]:
        """Around engine calls, on the caller's thread."""
        if not self.is_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=torch.bfloat16)

    def in_loss(self) -> contextlib.AbstractContextManager[Any]:
        """Around `compute_loss`, on a worker."""
        if not self.is_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def finish(self, outputs: Any) -> Any:
        """Outputs as the caller of the model sees them."""
        return convert_to_fp32(outputs) if self.is_autocast else outputs


def precision_of(args: TrainingArguments, model: nn.Module) -> Precision:
    """Weights that are bf16 already need no autocast."""
    has_fp32 = any(parameter.dtype is torch.float32 for parameter in model.parameters())
    return Precision(device_type=device_type_of(args), is_autocast=args.bf16 and has_fp32)
