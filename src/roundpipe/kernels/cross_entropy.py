"""Cross-entropy and its gradient in one kernel on a GPU: logits are read twice and written once, in
their own dtype.

torch's own operations make an fp32 softmax of them first, which takes five times the traffic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_NUM_WARPS = 16


@triton.jit
def _cross_entropy(
    logits,
    labels,
    losses,
    vocabulary,
    ignored,
    smoothing,
    scale,
    makes_gradient: tl.constexpr,
    block: tl.constexpr,
):
    """One row: its loss, and where it was its gradient by the unscaled logits."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    label = tl.load(labels + row)
    lanes = tl.arange(0, block)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if makes_gradient:
            for start in range(0, vocabulary, block):
                at = start + lanes
                tl.store(
                    logits + at, tl.zeros([block], logits.dtype.element_ty), mask=at < vocabulary
                )
        return

    # Finite, because a lane that has only seen -inf must not compute inf - inf.
    largest = tl.full([block], -3.0e38, tl.float32)
    exponentials = tl.zeros([block], tl.float32)
    total = tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        at = start + lanes
        is_there = at < vocabulary
        logit = tl.load(logits + at, mask=is_there, other=float("-inf")).to(tl.float32) * scale
        larger = tl.maximum(largest, logit)
        exponentials = exponentials * tl.exp(largest - larger) + tl.exp(logit - larger)
        largest = larger
        total += tl.where(is_there, logit, 0.0)
    peak = tl.max(largest)
    log_sum = peak + tl.log(tl.sum(exponentials * tl.exp(largest - peak)))
    is_class = (label >= 0) & (label < vocabulary)
    at_label = tl.load(logits + label, mask=is_class, other=float("nan")).to(tl.float32) * scale
    loss = log_sum - at_label
    if smoothing > 0:
        loss = (1 - smoothing) * loss + smoothing * (log_sum - tl.sum(total) / vocabulary)
    tl.store(losses + row, loss)

    if makes_gradient:
        tl.debug_barrier()  # because other threads may still read the label's logit
        off_target = smoothing / vocabulary
        for start in range(0, vocabulary, block):
            at = start + lanes
            is_there = at < vocabulary
            logit = tl.load(logits + at, mask=is_there, other=float("-inf")).to(tl.float32) * scale
            gradient = tl.exp(logit - log_sum) - off_target
            gradient -= tl.where(at == label, 1 - smoothing, 0.0)
            tl.store(logits + at, (gradient * scale).to(logits.dtype.element_ty), mask=is_there)


def suits(logits: Tensor) -> bool:
    """Whether the kernel computes these as exactly as torch would."""
    return (
        logits.is_cuda
        and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and logits.is_contiguous()
    )


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    *,
    ignored: int,
    smoothing: float,
    scale: float,
    makes_gradient: bool,
) -> Tensor:
    """Losses (rows,) in fp32 of ``logits`` (rows, vocabulary) times ``scale``.

    If ``makes_gradient``, the memory of ``logits`` then holds the gradient of their losses' sum by
    them. ``labels`` (rows,) that are ``ignored`` have no loss and no gradient.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    # Because kernels start on the current one.
    with torch.accelerator.device_index(logits.device.index):
        _cross_entropy[(len(logits),)](
            logits,
            labels,
            losses,
            logits.shape[1],
            ignored,
            smoothing,
            scale,
            makes_gradient=makes_gradient,
            block=_BLOCK,
            num_warps=_NUM_WARPS,
        )
    return losses
