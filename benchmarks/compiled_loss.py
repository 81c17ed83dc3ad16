"""The resident reference's loss: linear head + cross-entropy in chunks of tokens, one compiled pass
over each.

Less exact than `roundpipe.kernels.linear_cross_entropy` (gradients are summed over chunks in
16 bits) and faster: a ceiling.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK = 2048
IGNORED = -100


def _loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of one chunk in fp32, and its gradient by the logits in their dtype."""
    wide = logits.float()
    log_sum = torch.logsumexp(wide, dim=-1, keepdim=True)
    valid = targets != IGNORED
    index = targets.where(valid, 0).unsqueeze(-1)
    loss = ((log_sum - wide.gather(-1, index)).squeeze(-1) * valid).sum()
    one_hot = torch.arange(logits.shape[-1], device=logits.device) == index
    gradient = ((wide - log_sum).exp() - one_hot.float()) * valid.unsqueeze(-1)
    return loss, gradient.to(logits.dtype)


@cache
def _compiled_loss_and_gradient() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Made when it is first asked for, because that imports torch's compiler."""
    return torch.compile(_loss_and_gradient, dynamic=False)


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        loss = torch.zeros((), device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        compiled = _compiled_loss_and_gradient()
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            part, d_logits = compiled(hidden[rows] @ weight.T, targets[rows])
            loss += part
            d_hidden[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight.addmm_(d_logits.T, hidden[rows])
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor | None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * scale, None if d_weight is None else d_weight * scale, None


def chunked_causal_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of predicting ``tokens`` (rows, length) from ``hidden`` (rows, length, width),
    summed."""
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden.flatten(0, 1), weight, targets.flatten())
    return loss
