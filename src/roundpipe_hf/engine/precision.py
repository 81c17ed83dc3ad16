"""``bf16=True`` or ``fp16=True`` on fp32 weights: autocast around the engine's work, as accelerate
puts it around the model's forward.

The engine carries the caller's autocast into its workers, the loss function included. Trainer
computes losses outside of the model's autocast and on fp32 outputs, so both are restored there.
"""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from ..arguments import device_type_of
from ..compat import convert_to_fp32


@dataclass(frozen=True, kw_only=True)
class Precision:
    """``autocast``: what is computed in, None for the weights' own dtype."""

    device_type: str
    autocast: torch.dtype | None

    def in_model(self) -> contextlib.AbstractContextManager[Any]:
        """Around engine calls, on the caller's thread."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast)

    def in_loss(self) -> contextlib.AbstractContextManager[Any]:
        """Around `compute_loss`, on a worker."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def finish(self, outputs: Any) -> Any:
        """Outputs as the caller of the model sees them."""
        return outputs if self.autocast is None else convert_to_fp32(outputs)


def precision_of(
    args: TrainingArguments,
    dtypes: Collection[torch.dtype],
    *,
    full_eval: torch.dtype | None = None,
) -> Precision:
    """Weights that are bf16 or fp16 already need no autocast.

    Args:
        dtypes: those of the model's parameters.
        full_eval: what ``bf16_full_eval`` / ``fp16_full_eval`` ask for. It computes in that dtype
            from the weights as they are, because they live on the host and masters must not lose
            anything.
    """
    wanted = full_eval or (torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None)
    has_fp32 = torch.float32 in dtypes
    return Precision(device_type=device_type_of(args), autocast=wanted if has_fp32 else None)


def full_eval_of(args: TrainingArguments) -> torch.dtype | None:
    return torch.float16 if args.fp16_full_eval else torch.bfloat16 if args.bf16_full_eval else None
