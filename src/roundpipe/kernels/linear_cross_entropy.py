"""Linear head + cross-entropy over chunks of tokens, so that the logits of a microbatch never exist
at once.

Gradients are made in the forward pass, chunk by chunk, while a chunk's logits are there; backward
only scales them. That suits a pipeline, which runs backward right behind forward. torch's own
chunked ``linear_cross_entropy`` came with 2.13 and knows neither label smoothing nor a logit soft
cap.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..errors import ConfigError
from . import triton_kernels

# About 1,100 tokens of a vocabulary of 152,000 in 16 bits. Fewer would keep a GPU's matrix units
# busy, but each chunk reads and writes the head's whole fp32 gradient once.
DEFAULT_CHUNK_BYTES = 320 << 20

# Their fp32 softmax is made of a part of a chunk at a time, because in 16 bits it is twice the size
# of the logits.
_SLICES_PER_CHUNK = 8

# Of a factor that is copied into a wider dtype.
_COPIED_BYTES = 16 << 20

_IGNORED = -100


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    num_items_in_batch: Tensor | int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Tensor:
    """``cross_entropy(linear(hidden, weight, bias).float(), labels)`` without ever holding all
    logits.

    The loss is computed and summed in fp32; gradients in 16 bits are summed over chunks in fp32 and
    rounded once. Without grad mode no gradient is made. The graph is for one backward,
    ``retain_graph`` or not.

    Args:
        hidden: (..., width), what the head is applied to.
        weight, bias: the head's, (vocabulary, width) and (vocabulary,).
        labels: (...), one for each position of ``hidden``: for a causal model already shifted.
        reduction: ``"mean"`` over the labels that count (0 if none does, where torch says nan) or
            ``"sum"``.
        num_items_in_batch: if given, the sum divided by it, whatever ``reduction`` says.
        logit_scale: logits are multiplied by it;
        softcap: and then become ``softcap * tanh(logits / softcap)``. Both in the dtype of the
            logits.
        chunk_bytes: logits that exist at once.

    Raises:
        ConfigError: the shapes of ``hidden`` and ``labels`` do not go together.

    Example:
        >>> hidden = torch.randn(2, 5, 8, requires_grad=True)
        >>> weight = torch.randn(100, 8, requires_grad=True)
        >>> linear_cross_entropy(hidden, weight, torch.randint(100, (2, 5))).backward()
    """
    if hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} has positions of shape {tuple(hidden.shape[:-1])}, "
            f"labels have {tuple(labels.shape)}; give one label for each position, {ignore_index} "
            "where none counts"
        )
    labels = labels.reshape(-1)
    labels = labels.masked_fill(labels == ignore_index, _IGNORED)
    if labels.is_cuda:
        # As torch does for labels that are no class; the kernel below would not notice.
        is_valid = (labels == _IGNORED) | ((labels >= 0) & (labels < len(weight)))
        torch._assert_async(
            is_valid.all(), f"a label is none of the {len(weight)} classes and not {ignore_index}"
        )
    settings = _Settings(
        label_smoothing, logit_scale, softcap, chunk_bytes, torch.is_grad_enabled()
    )
    total: Tensor = _LinearCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels, settings
    )
    if num_items_in_batch is not None:
        items = num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return total if reduction == "sum" else total / (labels != _IGNORED).sum().clamp(min=1)


class _Settings(NamedTuple):
    label_smoothing: float
    logit_scale: float
    softcap: float | None
    chunk_bytes: int
    makes_gradients: bool


class _Gradients:
    """Sums of the inputs' gradients over chunks, in fp32 or wider; None for an input that wants
    none."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        def zeros(of: Tensor | None, is_wanted: bool) -> Tensor | None:
            if of is None or not is_wanted:
                return None
            return torch.zeros_like(
                of, dtype=_wide(of.dtype), memory_format=torch.contiguous_format
            )

        self.hidden = zeros(hidden, wanted[0])
        self.weight = zeros(weight, wanted[1])
        self.bias = zeros(bias, wanted[2])

    @property
    def are_wanted(self) -> bool:
        return any(sum_ is not None for sum_ in (self.hidden, self.weight, self.bias))

    def add(
        self, rows: slice, d_logits: Tensor, hidden: Tensor, weight: Tensor, valid: Tensor
    ) -> None:
        """Adds what one chunk gives: ``d_logits`` (rows, vocabulary), in which rows that do not
        count hold anything."""
        if self.hidden is not None:
            _add_product(self.hidden[rows], d_logits, weight)
            self.hidden[rows].mul_(valid)
        if self.weight is not None:
            _add_product(self.weight, d_logits.T, hidden * valid)
        if self.bias is not None:
            _add_product(self.bias.unsqueeze(0), valid.T.to(d_logits.dtype), d_logits)


class _LinearCrossEntropy(Function):
    """The sum of the losses. What it saves are its gradients, which backward scales in place: a
    second backward finds them written, and autograd says so."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        settings: _Settings,
    ) -> Tensor:
        # Whoever asks for shapes alone runs this on the meta device, which has no autocast.
        kind = "cpu" if hidden.is_meta else hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        makes_gradients = settings.makes_gradients
        with torch.autocast(kind, enabled=False):
            gradients = _Gradients(
                hidden,
                weight,
                bias,
                tuple(makes_gradients and needs for needs in ctx.needs_input_grad[:3]),
            )
            head = weight.to(dtype), None if bias is None else bias.to(dtype)
            loss = _sum_over_chunks(hidden.to(dtype), *head, labels, settings, gradients)
        ctx.save_for_backward(
            gradients.hidden, gradients.weight, gradients.bias, labels != _IGNORED
        )
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        *sums, valid = ctx.saved_tensors
        # Rows that do not count get no gradient even of a loss divided by 0 items, where 0 * inf
        # would be nan.
        by_row, over_all = d_loss.where(valid, 0).unsqueeze(1), d_loss.where(valid.any(), 0)
        scaled = (
            None if sum_ is None else _scaled(sum_, scale, dtype)
            for sum_, scale, dtype in zip(
                sums, (by_row, over_all, over_all), ctx.dtypes, strict=True
            )
        )
        return (*scaled, None, None)


def _sum_over_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    settings: _Settings,
    gradients: _Gradients,
) -> Tensor:
    """The summed loss, fp32 or wider; adds to ``gradients`` on the way."""
    losses = torch.empty(len(labels), dtype=_wide(hidden.dtype), device=hidden.device)
    row_bytes = len(weight) * hidden.element_size()
    for rows in _chunks(len(labels), settings.chunk_bytes // row_bytes):
        logits = F.linear(hidden[rows], weight, bias)
        valid = labels[rows] != _IGNORED
        kernel = _kernel_for(logits, settings)
        if kernel is not None:
            losses[rows] = kernel.cross_entropy_(
                logits,
                labels[rows],
                ignored=_IGNORED,
                smoothing=settings.label_smoothing,
                scale=settings.logit_scale,
                makes_gradient=gradients.are_wanted,
            )
        else:
            targets = labels[rows].where(valid, 0).unsqueeze(1)
            for part in _chunks(
                len(logits), settings.chunk_bytes // row_bytes // _SLICES_PER_CHUNK
            ):
                losses[rows][part] = _losses(
                    logits[part], targets[part], settings, gradients.are_wanted
                )
        if gradients.are_wanted:
            gradients.add(rows, logits, hidden[rows], weight, valid.unsqueeze(1))
    # The kernel that torch sums the whole batch's losses with, so that the sum is torch's to the
    # bit.
    only_class = labels.masked_fill(labels != _IGNORED, 0)
    return F.nll_loss(-losses.unsqueeze(1), only_class, ignore_index=_IGNORED, reduction="sum")


def _kernel_for(logits: Tensor, settings: _Settings) -> ModuleType | None:
    kernel = (
        triton_kernels("cross_entropy") if logits.is_cuda and settings.softcap is None else None
    )
    return kernel if kernel is not None and kernel.suits(logits) else None


def _losses(logits: Tensor, targets: Tensor, settings: _Settings, makes_gradient: bool) -> Tensor:
    """Losses (rows,) of ``logits`` (rows, vocabulary), whose memory then holds their gradient, if
    that is wanted."""
    slope = _shape(logits, settings)
    smoothing = settings.label_smoothing
    log_p = F.log_softmax(logits, dim=1, dtype=_wide(logits.dtype))
    target_log_p = log_p.gather(1, targets)
    losses = -target_log_p.squeeze(1)
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * log_p.mean(dim=1)
    if makes_gradient:
        off_target = smoothing / logits.shape[1]
        on_target = target_log_p.exp() - (1 - smoothing + off_target)
        if smoothing:
            torch.sub(log_p.exp_(), off_target, out=logits)
        else:
            torch.exp(log_p, out=logits)
        logits.scatter_(1, targets, on_target.to(logits.dtype))
        if slope is not None:
            logits.mul_(slope)
        if settings.logit_scale != 1.0:
            logits.mul_(settings.logit_scale)
    return losses


def _shape(logits: Tensor, settings: _Settings) -> Tensor | None:
    """Scales and caps ``logits`` in place; the derivative of the cap, if there is one."""
    if settings.logit_scale != 1.0:
        logits.mul_(settings.logit_scale)
    if settings.softcap is None:
        return None
    logits.div_(settings.softcap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(settings.softcap)
    return slope


def _chunks(count: int, size: int) -> Iterator[slice]:
    """As few and as equal slices of at most ``size`` (at least one) as cover ``count``."""
    number = -(-count // max(size, 1))
    start = 0
    for index in range(number):
        stop = start + (count - start) // (number - index)
        yield slice(start, stop)
        start = stop


def _add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    """``sum_ += left @ right``, multiplied in the factors' dtype and summed in ``sum_``'s."""
    if sum_.dtype == left.dtype:
        sum_.addmm_(left, right)
    elif sum_.is_cuda:
        torch.addmm(sum_, left, right, out_dtype=sum_.dtype, out=sum_)
    elif sum_.is_meta and len(sum_) < len(right):
        sum_.add_(left @ right)  # because shapes are all that is asked for, and CUDA copies no head
    else:  # only CUDA has a kernel that sums in another dtype
        # Part by part, because ``right`` may be a whole head, of which nobody has planned a copy.
        for part in _chunks(len(right), _COPIED_BYTES // (right.shape[1] * sum_.element_size())):
            sum_.addmm_(left[:, part].to(sum_.dtype), right[part].to(sum_.dtype))


def _scaled(sum_: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``sum_ * scale``, rounded once; in ``sum_``'s own memory where the dtype allows it."""
    if sum_.dtype == dtype:
        return sum_.mul_(scale)
    return torch.mul(sum_, scale, out=torch.empty_like(sum_, dtype=dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
