"""What the presets of causal language models share: the state between layers, head and loss,
microbatching.

Knows nothing of any architecture's blocks.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ConfigError
from ..layers.output_use import only_loss_is_wanted
from .calling import (
    by_name,
    honour_return_logits,
    parameters_of,
    refuse_unknown,
    row_wise_in,
)
from .loss import Loss, chunked, is_plain_linear, merge_outputs, weighted
from .preset import Cut, MergeOutput, SplitForward, SplitRows, split_by_rule

# Describe the batch as a whole, whatever their first dimension happens to be.
_NEVER_CUT = frozenset({"logits_to_keep", "num_items_in_batch", "loss_weight"})
_LOGITS = ("skip_logits", "return_logits")
# Of what has a `head` and a `config`, the last hidden states and the labels.
Readout = Callable[[Any, torch.Tensor, torch.Tensor | None], Any]
_FLASH_OFFSETS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})


class LossState(TypedDict):
    """The part of what travels that the last layer reads."""

    hidden_states: torch.Tensor  # (rows, tokens, hidden)
    labels: torch.Tensor | None
    last_kwargs: dict[str, Any]  # of the last part: logits_to_keep, ...
    loss_weight: float | None  # see loss.py
    skip_logits: bool | None  # see `wants_only_loss`
    readout: Readout | None  # see `HeadAndLoss`


class HeadAndLoss(nn.Module):
    """Last layer: final norm, head, and the loss when labels were given. ``balance``: adds the
    auxiliary loss, if the model has routers."""

    def __init__(
        self, model: Any, norm: nn.Module, output_class: type[Any], balance: Any = None
    ) -> None:
        super().__init__()
        self.norm = norm
        self.head = model.lm_head
        self.output_class = output_class
        self.balance = balance
        self.config = model.config
        self.loss = Loss(model)
        self.row_wise = row_wise_in(self)

    def forward(self, state: Any) -> Any:
        """The model's output. Its past is always None: in training no cache is built.

        A call with ``readout=function`` gets what ``function(self, hidden_states, labels)`` makes
        of the last hidden states in place of it, without logits.
        """
        output = self._output(state)
        return output if self.balance is None else self.balance.added(output, state)

    def _output(self, state: LossState) -> Any:
        hidden_states, labels = self.norm(state["hidden_states"]), state["labels"]
        if state["readout"] is not None:
            return state["readout"](self, hidden_states, labels)
        kwargs = {"vocab_size": self.config.vocab_size, **state["last_kwargs"]}
        keep = kwargs.pop("logits_to_keep", 0)
        kwargs.pop("output_router_logits", None)
        kept = hidden_states[:, slice(-keep, None) if isinstance(keep, int) else keep, :]
        if labels is None:
            return self.output_class(logits=self.head(kept))
        skips = wants_only_loss(state["skip_logits"])
        if skips and is_plain_linear(self.head) and self.loss.is_token_mean():
            return self.output_class(loss=chunked(kept, self.head, labels, kwargs))
        logits = self.head(kept)
        loss = weighted(
            logits,
            state["loss_weight"],
            lambda: self.loss.function(logits=logits, labels=labels, **kwargs),
        )
        return self.output_class(loss=loss, logits=None if skips else logits)


def wants_only_loss(skip_logits: bool | None) -> bool:
    """``skip_logits`` of the call, the argument that Liger's models take; where it says nothing,
    the engine knows."""
    return only_loss_is_wanted() if skip_logits is None else skip_logits


def split_batch(
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n: int,
    split_rows: SplitRows = split_by_rule,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cuts the arguments of ``model``'s forward into ``n`` microbatches whose losses add up to that
    of the batch.

    ``split_rows(model, named, n)`` cuts what has rows. What the mean is over are the batch's valid
    tokens (see loss.py). A single microbatch is left alone and so stays identical to the model's
    own forward to the bit.
    """
    named = by_name(type(model), args, kwargs)
    if "return_logits" not in parameters_of(type(model)):
        honour_return_logits(named)
    refuse_unknown(model, named, also=_LOGITS)
    _warn_if_documents_leak(named)
    whole = {name: named.pop(name) for name in _NEVER_CUT | _FLASH_OFFSETS if name in named}
    parts = [part | whole for part in split_rows(model, named, n)]
    if len(parts) > 1:
        if any(whole.get(name) is not None for name in _FLASH_OFFSETS):
            raise ConfigError(
                "cu_seq_lens_* / max_length_* describe all rows of the batch together, so it "
                "cannot be cut into "
                f"{len(parts)} microbatches; pack it into one row or use num_microbatch=1"
            )
        loss = Loss(model)
        is_sum = whole.get("num_items_in_batch") is not None and loss.heeds_num_items()
        if named.get("labels") is not None and not is_sum:
            _make_losses_add_up(loss, named, parts)
    return [()] * len(parts), parts


def refuse_unread(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for keywords that nothing in the model reads."""
    refuse_unknown(model, by_name(type(model), args, kwargs), also=_LOGITS)


def _make_losses_add_up(loss: Loss, batch: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    valid = _valid_tokens(batch)
    takes_num_items = loss.takes_num_items()
    for part in parts:
        if takes_num_items:
            part["num_items_in_batch"] = valid
        else:
            part["loss_weight"] = float(_valid_tokens(part) / valid)


def _valid_tokens(kwargs: dict[str, Any]) -> torch.Tensor:
    """How many predictions count: the first label of a row is nobody's target."""
    shifted = kwargs.get("shift_labels")
    targets: torch.Tensor = kwargs["labels"][..., 1:] if shifted is None else shifted
    return targets.ne(kwargs.get("ignore_index", -100)).sum()


def _warn_if_documents_leak(kwargs: dict[str, Any]) -> None:
    """transformers tells packed documents apart by ``position_ids``, but only without a mask."""
    mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return
    if position_ids is None or position_ids.ndim != 2:  # of three kinds, images restart some
        return
    if bool((position_ids.diff(dim=-1) != 1).any()) and bool(mask.all()):
        warnings.warn(
            "position_ids restart within a row, but an attention_mask of ones is given as well: "
            "the documents "
            "attend to each other, as in the plain model. Leave the mask out to keep them apart.",
            stacklevel=2,
        )


def assemble(
    model: PreTrainedModel,
    prefix: nn.Module,
    blocks: Iterable[nn.Module],
    suffix: nn.Module,
    split_input: Callable[..., Any] = split_batch,
    merge: MergeOutput = merge_outputs,
    is_joint: Callable[..., bool] | None = None,
    check: Callable[..., None] = refuse_unread,
    split_rows: SplitRows = split_by_rule,
) -> Cut:
    """A decoder of these layers, microbatched as causal language models are."""
    return Cut(
        sequential=nn.Sequential(prefix, *blocks, suffix),
        split_input=SplitForward(
            model=model, split=split_input, check=check, joint=is_joint, split_rows=split_rows
        ),
        merge_output=merge,
    )
