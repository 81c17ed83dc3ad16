"""What the presets of causal language models share: the state between layers, head and loss, microbatching.

Knows nothing of any architecture's blocks. The rule all of it serves: the losses of microbatches *add up*.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import ConfigError
from ..microbatch import merge, split

# Describe the batch as a whole, whatever their first dimension happens to be.
_NEVER_CUT = frozenset({"logits_to_keep", "num_items_in_batch", "loss_weight"})
_FLASH_OFFSETS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
_LOSS_KWARGS = ("num_items_in_batch", "shift_labels", "ignore_index")


class State(TypedDict):
    """What travels from layer to layer. Only ``hidden_states`` carries a gradient."""

    hidden_states: torch.Tensor  # (rows, tokens, hidden)
    masks: dict[str, Any]  # by kind of attention: what the attention implementation takes, None where it needs none
    position_embeddings: tuple[torch.Tensor, torch.Tensor]  # cos, sin
    position_ids: torch.Tensor  # (rows or 1, tokens)
    block_kwargs: dict[str, Any]  # for every block (offsets of packed sequences, ...)
    labels: torch.Tensor | None
    logits_to_keep: int | torch.Tensor
    loss_kwargs: dict[str, Any]
    loss_weight: float | None  # see `split_batch`


class Loss:
    """The model's ``loss_function`` as it is when called, so that assigning another one takes effect.

    Not a module, on purpose: a suffix that registered the model would own every layer's parameters.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = self._model.loss_function(**kwargs)
        return loss

    def takes_num_items(self) -> bool:
        """Whether the loss can be told by how much to divide (every loss of transformers for causal LMs can)."""
        return "num_items_in_batch" in inspect.signature(self._model.loss_function).parameters


class HeadAndLoss(nn.Module):
    """Last layer: final norm, head, and the loss when labels were given."""

    def __init__(self, model: PreTrainedModel, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.head = head
        self.config = model.config
        self.loss = Loss(model)

    def forward(self, state: State) -> CausalLMOutputWithPast:
        hidden_states = self.norm(state["hidden_states"])
        keep = state["logits_to_keep"]
        logits = self.head(hidden_states[:, slice(-keep, None) if isinstance(keep, int) else keep, :])
        loss = None
        if state["labels"] is not None:
            loss = self._loss(logits, state["labels"], state)
        return CausalLMOutputWithPast(loss=loss, logits=logits)  # type: ignore[arg-type]  # FloatTensor, says its stub

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, state: State) -> torch.Tensor:
        weight = state["loss_weight"]
        if weight == 0.0:  # a mean over no tokens is nan, and nan times zero too
            return logits.float().sum() * 0.0
        kwargs = state["block_kwargs"] | state["loss_kwargs"]
        loss = self.loss(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return loss if weight is None else loss * weight


def take_loss_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Moves what only the loss reads out of ``kwargs``: blocks ignore it, and compiled ones would recompile for it."""
    return {name: kwargs.pop(name) for name in _LOSS_KWARGS if name in kwargs}


def refuse_unsupported(config: Any, past_key_values: Any, use_cache: bool | None, kwargs: dict[str, Any]) -> None:
    """Raises for what the model's own forward would do and a sequence of blocks cannot."""
    if past_key_values is not None or use_cache:
        raise ConfigError("the pipeline keeps no key-value cache; leave out past_key_values and use_cache=True")
    for name in ("output_hidden_states", "output_attentions"):
        if kwargs.get(name, getattr(config, name, False)):
            raise ConfigError(f"{name}=True: what each block returns is not collected by the pipeline; leave it out")
    for name in ("adapter_names", "alora_offsets", "task_ids"):
        if kwargs.get(name) is not None:
            raise ConfigError(f"{name}: one adapter serves the whole batch in the pipeline; leave it out")
    if config._attn_implementation == "flex_attention":
        raise ConfigError("flex_attention's BlockMask cannot move between devices; load the model with sdpa or flash")
    if kwargs.pop("return_dict", None) is False or not config.return_dict:
        raise ConfigError("return_dict=False: the pipeline returns a ModelOutput; use its to_tuple()")


def split_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cuts the arguments of ``model``'s forward into ``n`` microbatches whose losses add up to that of the batch.

    A mean over the batch's valid tokens becomes a sum over microbatches by dividing each by the *batch's* count:
    given as ``num_items_in_batch`` where the loss takes it, else by weighting each microbatch's own mean. A single
    microbatch is left alone and so stays identical to the model's own forward to the bit.
    """
    named = _by_name(model, args, kwargs)
    _warn_if_documents_leak(named)
    whole = {name: named.pop(name) for name in _NEVER_CUT | _FLASH_OFFSETS if name in named}
    parts = [part | whole for _, part in split((), named, None, n).inputs]
    if len(parts) > 1:
        if any(whole.get(name) is not None for name in _FLASH_OFFSETS):
            raise ConfigError(
                f"cu_seq_lens_* / max_length_* describe all rows of the batch together, so it cannot be cut into "
                f"{len(parts)} microbatches; pack it into one row or use num_microbatch=1"
            )
        if named.get("labels") is not None and whole.get("num_items_in_batch") is None:
            _make_losses_add_up(Loss(model), named, parts)
    return [()] * len(parts), parts


def merge_outputs(outputs: Sequence[CausalLMOutputWithPast], rows: Sequence[int]) -> CausalLMOutputWithPast:
    """Logits row by row; the losses' sum, which `split_batch` (or the caller's ``num_items_in_batch``) made exact."""
    if len(outputs) == 1:
        return outputs[0]
    losses = [output.loss for output in outputs if output.loss is not None]
    return CausalLMOutputWithPast(
        loss=sum(losses[1:], losses[0]) if losses else None,
        logits=merge([output.logits for output in outputs], rows),
    )


def _by_name(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = dict(inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments)
    del named["self"]
    more: dict[str, Any] = named.pop("kwargs", {})
    return named | more


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
    """transformers tells packed documents apart by ``position_ids``, but only if there is no mask (case BC-19)."""
    mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or position_ids is None:
        return
    if bool((position_ids.diff(dim=-1) != 1).any()) and bool(mask.all()):
        warnings.warn(
            "position_ids restart within a row, but an attention_mask of ones is given as well: the documents "
            "attend to each other, as in the plain model. Leave the mask out to keep them apart.",
            stacklevel=2,
        )
