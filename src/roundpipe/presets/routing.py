"""Mixture-of-experts blocks: a recompute sends every token to the experts of the forward, and the
router's logits travel on to the auxiliary loss.

Knows no architecture: whatever a block chooses, it chooses with ``topk``.
"""

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypedDict

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from ..microbatch import merge
from ..recompute.user_data import doing_recompute, get_recompute_data, save_for_recompute
from . import causal_lm
from .architectures.llama import Block, Prefix, State
from .calling import by_name
from .causal_lm import HeadAndLoss, assemble
from .loss import merge_outputs
from .preset import Cut

Chain = tuple[Any, torch.Tensor]


class Routed(TypedDict):
    """What travels for the auxiliary loss: the logits of all routers so far (None: it is not
    wanted).

    They form a chain, each block adding a link, because a compiled block that saw their number
    would be compiled anew for each.
    """

    router_logits: (
        tuple[()] | Chain | None
    )  # ((..., (tokens of all rows, experts)), (tokens of all rows, experts))
    attention_mask: torch.Tensor | None  # (rows, tokens): which tokens the auxiliary loss counts
    has_siblings: bool  # the batch has other microbatches, so the last layer makes sums


class RoutedState(State, Routed):
    """What travels from layer to layer."""


class KeptChoice(TorchFunctionMode):
    """Within it ``topk`` chooses in a recompute what it chose in the forward.

    Rounding may differ there (another kernel, another device), and a token close to the border
    between two experts would get the gradient of an expert that did not compute it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: Iterator[torch.Tensor] | None = (
            iter(get_recompute_data()) if doing_recompute() else None
        )
        self._chosen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_choice = func is torch.topk or func is torch.Tensor.topk
        if is_choice and self._kept is not None:
            return _chosen_again(next(self._kept), *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if is_choice:
            self._chosen.append(result.indices)
        return result

    def save(self) -> None:
        """Hands what was chosen to the engine, which gives it back in the recompute."""
        if self._kept is None:
            save_for_recompute(*self._chosen)


def _chosen_again(
    indices: torch.Tensor, input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any
) -> Any:
    return torch.return_types.topk((input.gather(dim, indices), indices))


class RoutedPrefix(Prefix):
    """First layer of a decoder with experts."""

    # As in the models, ``logits_to_keep`` is one place further back.
    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        has_siblings: bool = False,
        **kwargs: Any,
    ) -> RoutedState:
        state = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            labels,
            use_cache,
            logits_to_keep,
            **kwargs,
        )
        wanted = wants_auxiliary_loss(self.config, output_router_logits)
        return RoutedState(
            **state,
            router_logits=() if wanted else None,
            attention_mask=attention_mask if wanted else None,
            has_siblings=has_siblings,
        )


class RoutedBlock(Block):
    """One decoder block with experts. ``router``: where its router is, seen from the block."""

    def __init__(self, block: nn.Module, kind: str, router: str) -> None:
        super().__init__(block, kind)
        self.router = router

    def forward(self, state: RoutedState) -> RoutedState:  # type: ignore[override]
        made: RoutedState = run_routed(super().forward, state, self.block, self.router)
        return made


def run_routed(run: Callable[..., Any], state: Any, block: nn.Module, router: str | None) -> Any:
    """Has ``run`` run a block: a recompute chooses as the forward did, and what the ``router``
    says joins the chain where that is wanted. None: the block has no router."""
    logits = state["router_logits"]
    choice = KeptChoice()
    if logits is None or router is None:
        with choice:
            made = run(state)
    else:
        with choice, _outputs_of(operator.attrgetter(router)(block)) as outputs:
            made = run(state)
        (said,) = outputs
        logits = logits, said[0] if isinstance(said, tuple) else said
    choice.save()
    return {**made, "router_logits": logits}


class RoutedHeadAndLoss(HeadAndLoss):
    """Last layer of a decoder with experts: adds the auxiliary loss."""

    output_class: type[Any] = MoeCausalLMOutputWithPast

    def __init__(self, model: Any, norm: nn.Module, head: nn.Module) -> None:
        super().__init__(model, norm, head)
        self.balance = Balance(model)

    def forward(self, state: RoutedState) -> Any:  # type: ignore[override]
        """The model's output; what a readout returns gets the auxiliary loss as ``aux_loss``."""
        return self.balance.added(super().forward(state), state)


class Balance:
    """The auxiliary loss of a model's routers. See docs/internals/losses.md.

    No module, because it has no weights. A batch that is one microbatch gets what the model's own
    function says. Of several, each gets the sums that the function makes its means of, in the place
    of ``aux_loss``, and `merge` makes the loss of the batch from them.
    """

    def __init__(self, model: Any) -> None:
        self.coefficient: float = model.router_aux_loss_coef
        self.num_experts: int = model.num_experts
        self.num_chosen: int = model.num_experts_per_tok
        self.function: Callable[..., torch.Tensor] = _function_of(model)

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
        choice = KeptChoice()
        with choice:
            made = self._sums if state["has_siblings"] else self._whole
            auxiliary = made(links, state["attention_mask"])
        choice.save()
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


def assemble_routed(
    model: PreTrainedModel,
    prefix: nn.Module,
    blocks: Sequence[nn.Module],
    suffix: nn.Module,
    balance: Balance,
) -> Cut:
    """A decoder of these layers, whose batches may have an auxiliary loss."""
    return assemble(
        model, prefix, blocks, suffix, split_batch, merge=balance.merge, is_joint=wanted_in_call
    )


def split_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """As for every causal language model. Where the auxiliary loss is wanted, microbatches are told
    that they are not all of the batch."""
    args_list, parts = causal_lm.split_batch(model, args, kwargs, n)
    if len(parts) > 1 and wanted_in_call(model, (), parts[0]):
        parts = [part | {"has_siblings": True} for part in parts]
    return args_list, parts


def wanted_in_call(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call of ``model`` asks for the auxiliary loss."""
    named = by_name(type(model), args, dict(kwargs))
    return wants_auxiliary_loss(model.config, named.get("output_router_logits"))


def wants_auxiliary_loss(config: Any, output_router_logits: bool | None) -> bool:
    """What a call says beats the config."""
    in_config = getattr(config, "output_router_logits", False)
    return bool(in_config if output_router_logits is None else output_router_logits)


def _links(chain: Any) -> tuple[torch.Tensor, ...]:
    links = []
    while chain:
        chain, link = chain
        links.append(link)
    return tuple(reversed(links))


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """What ``module`` returns while the context lasts.

    The dictionary of hooks is replaced, not added to: a replica shares it with the user's module,
    and another device may be running that at this moment.
    """
    outputs: list[Any] = []
    before = module._forward_hooks
    module._forward_hooks = OrderedDict(before)
    module.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        yield outputs
    finally:
        module._forward_hooks = before
