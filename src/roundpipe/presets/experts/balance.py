"""The auxiliary loss of a decoder's routers, of a whole batch whatever its number of microbatches.

See docs/internals/losses.md.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from ...microbatch import merge
from ...recompute.user_data import save_for_recompute
from .. import causal_lm
from ..calling import by_name
from ..loss import merge_outputs
from ..preset import Cut, SplitRows, split_by_rule
from .routing import KeptChoice, Routed, choices_of_the_forward, wants_auxiliary_loss


class Balance:
    """The auxiliary loss of a model's routers. See docs/internals/losses.md.

    No module, because it has no weights. A batch that is one microbatch gets what the model's own
    function says. Of several, each gets the sums that the function makes its means of, in the place
    of ``aux_loss``, and `merge` makes the loss of the batch from them.
    """

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        self._named = model if text is model.config else text  # where models that see have these
        self.function: Callable[..., torch.Tensor] = _function_of(model)
        for name in ("num_experts", "num_experts_per_tok", "router_aux_loss_coef"):
            if not hasattr(self._named, name):
                raise AttributeError(f"{type(model).__name__} has no attribute {name!r}")

    # These are read at the call, because the model's own forward reads them then.

    @property
    def num_experts(self) -> int:
        return int(self._named.num_experts)

    @property
    def num_chosen(self) -> int:
        return int(self._named.num_experts_per_tok)

    @property
    def coefficient(self) -> float:
        return float(self._named.router_aux_loss_coef)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """That of a model of any architecture, by the names that transformers gives its parts; None
        where one is missing."""
        try:
            return cls(model)
        except AttributeError:
            return None

    def added(self, output: Any, state: Routed) -> Any:
        """``output`` of a microbatch with the auxiliary loss, or its sums."""
        if state["router_logits"] is None:
            return output
        links = _links(state["router_logits"])
        choice = KeptChoice(choices_of_the_forward())
        with choice:
            made = self._sums if state["has_siblings"] else self._whole
            auxiliary = made(links, state["attention_mask"])
        save_for_recompute(*choice.chosen)
        has_logits = output.get("logits") is not None or not state["has_siblings"]
        kept = {"router_logits": links} if has_logits and hasattr(output, "router_logits") else {}
        if state["has_siblings"]:
            return _with(output, aux_loss=auxiliary, **kept)
        return _with(output, **self._in_loss(output, auxiliary), **kept)

    def merge(self, outputs: Sequence[Any], rows: Sequence[int]) -> Any:
        """The output of the batch. See `Cut`."""
        merged = merge_outputs(outputs, rows, apart=("aux_loss", "router_logits"))
        parts = [output.get("aux_loss") for output in outputs]
        if len(parts) == 1 or parts[0] is None:
            return merged
        kept = {}
        if outputs[0].get("router_logits") is not None:
            columns = zip(*(output.router_logits for output in outputs), strict=True)
            kept = {"router_logits": tuple(map(torch.cat, columns))}
        if parts[0].ndim == 0:  # each is a batch of its own
            return _with(merged, aux_loss=merge(parts, rows), **kept)
        chosen, probabilities, tokens = torch.stack(parts).sum(0)
        auxiliary = self.num_experts * (chosen / tokens * (probabilities / tokens)).sum()
        return _with(merged, **self._in_loss(merged, auxiliary), **kept)

    def _in_loss(self, output: Any, auxiliary: torch.Tensor) -> dict[str, torch.Tensor]:
        if output.get("loss") is None:
            return {"aux_loss": auxiliary}
        return {"aux_loss": auxiliary, "loss": output.loss + self.coefficient * auxiliary}

    def _whole(self, links: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
        return self.function(links, self.num_experts, self.num_chosen, mask)

    def _sums(self, links: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> torch.Tensor:
        """(3, experts): how many tokens have chosen each expert, the sum of its probabilities, and
        how many tokens there are, over all routers."""
        summed = torch.zeros(3, self.num_experts, device=links[0].device)
        for link in links:
            probabilities = link.softmax(-1)
            chosen = probabilities.topk(self.num_chosen, dim=-1).indices
            counted = probabilities.new_ones(len(link)) if mask is None else mask.reshape(-1)
            counted = counted.to(summed.dtype)
            of_choice = counted.repeat_interleave(self.num_chosen)
            made = (
                summed.new_zeros(self.num_experts).scatter_add_(0, chosen.reshape(-1), of_choice),
                (probabilities.float() * counted.unsqueeze(-1)).sum(0),
                counted.sum().expand(self.num_experts),
            )
            summed = summed + torch.stack(made)
        return summed


def _with(output: Any, **values: Any) -> Any:
    """In the order of the class's fields, which is that of a tuple made of it."""
    return type(output)(**{**output, **values})


def _function_of(model: Any) -> Callable[..., torch.Tensor]:
    """What the module of ``model``'s class, or of the one it is made from, calls so."""
    for cls in type(model).__mro__:
        found: Callable[..., torch.Tensor] | None = getattr(
            sys.modules[cls.__module__], "load_balancing_loss_func", None
        )
        if found is not None:
            return found
    raise AttributeError(f"{type(model).__name__} has no load_balancing_loss_func")


def assemble(
    model: PreTrainedModel,
    prefix: nn.Module,
    blocks: Sequence[nn.Module],
    suffix: nn.Module,
    balance: Balance | None,
    check: Callable[..., None] = causal_lm.refuse_unread,
    split_rows: SplitRows = split_by_rule,
) -> Cut:
    """A decoder of these layers, whose batches may have an auxiliary loss if it has routers."""
    split = causal_lm.split_batch if balance is None else split_batch
    return causal_lm.assemble(
        model,
        prefix,
        blocks,
        suffix,
        partial(split, split_rows=split_rows),
        merge=merge_outputs if balance is None else balance.merge,
        is_joint=None if balance is None else wanted_in_call,
        check=check,
        split_rows=split_rows,
    )


def split_batch(
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n: int,
    split_rows: SplitRows = split_by_rule,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """As for every causal language model. Where the auxiliary loss is wanted, microbatches are told
    that they are not all of the batch."""
    args_list, parts = causal_lm.split_batch(model, args, kwargs, n, split_rows)
    if len(parts) > 1 and wanted_in_call(model, (), parts[0]):
        parts = [part | {"has_siblings": True} for part in parts]
    return args_list, parts


def wanted_in_call(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call of ``model`` asks for the auxiliary loss."""
    named = by_name(type(model), args, dict(kwargs))
    return wants_auxiliary_loss(type(model), model.config, named.get("output_router_logits"))


def balance_of(model: PreTrainedModel, blocks: Iterable[nn.Module]) -> Balance | None:
    """None where there is no router, or more than one in a block."""
    routers = [routers_in(model, block) for block in blocks]
    is_clear = any(routers) and all(len(inside) <= 1 for inside in routers)
    return Balance.of(model) if is_clear else None


def why_unheard(model: PreTrainedModel, blocks: Iterable[nn.Module]) -> str:
    """Says why a model has no `balance_of` its routers."""
    counts = [len(routers_in(model, block)) for block in blocks]
    if not any(counts):
        return f"transformers records a router in none of its {len(counts)} blocks"
    layer = max(range(len(counts)), key=counts.__getitem__)
    if counts[layer] > 1:
        return f"block {layer} has {counts[layer]} routers, where one is needed"
    try:
        Balance(model)
    except AttributeError as error:
        return str(error)
    return "the loss of a batch is no sum over its microbatches"


def routers_in(model: PreTrainedModel, block: nn.Module) -> list[str]:
    """Where ``block`` has modules that transformers records as routers, whose first result are
    logits."""
    recorder: Any = (type(model)._can_record_outputs or {}).get("router_logits")
    kind = getattr(recorder, "target_class", None)
    if kind is None or recorder.index != 0:
        return []
    within = f".{recorder.layer_name or ''}.".replace("..", ".")
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, kind) and within in f".{name}."
    ]


def _links(chain: Any) -> tuple[torch.Tensor, ...]:
    links = []
    while chain:
        chain, link = chain
        links.append(link)
    return tuple(reversed(links))
