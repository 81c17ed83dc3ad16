"""Mixture-of-experts blocks: a recompute sends every token to the experts of the forward, and the
router's logits travel on to the auxiliary loss.

Knows no architecture: whatever a block chooses, it chooses with ``topk``.
"""

import operator
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from ..recompute.user_data import doing_recompute, get_recompute_data, save_for_recompute
from . import causal_lm
from .architectures.llama import Block, Prefix, State
from .calling import by_name
from .causal_lm import HeadAndLoss

Chain = tuple[Any, torch.Tensor]


class RoutedState(State):
    """What travels, and for the auxiliary loss the logits of all routers so far (None: it is not
    wanted).

    They form a chain, each block adding a link, because a compiled block that saw their number
    would be compiled anew for each.
    """

    router_logits: (
        tuple[()] | Chain | None
    )  # ((..., (tokens of all rows, experts)), (tokens of all rows, experts))
    attention_mask: torch.Tensor | None  # (rows, tokens): which tokens the auxiliary loss counts


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
        )


class RoutedBlock(Block):
    """One decoder block with experts. ``router``: where its router is, seen from the block."""

    def __init__(self, block: nn.Module, kind: str, router: str) -> None:
        super().__init__(block, kind)
        self.router = router

    def forward(self, state: RoutedState) -> RoutedState:  # type: ignore[override]
        logits = state["router_logits"]
        choice = KeptChoice()
        if logits is None:
            with choice:
                made = super().forward(state)
        else:
            with choice, _outputs_of(operator.attrgetter(self.router)(self.block)) as outputs:
                made = super().forward(state)
            ((link, *_),) = outputs
            logits = logits, link
        choice.save()
        # The same keys as ``state``.
        return {**made, "router_logits": logits}  # type: ignore[typeddict-item]


class RoutedHeadAndLoss(HeadAndLoss):
    """Last layer of a decoder with experts: adds the auxiliary loss, computed by the model's own
    function."""

    output_class: type[Any] = MoeCausalLMOutputWithPast

    def __init__(self, model: Any, norm: nn.Module, head: nn.Module) -> None:
        super().__init__(model, norm, head)
        self.coefficient: float = model.router_aux_loss_coef
        self.num_experts: int = model.num_experts
        self.num_chosen: int = model.num_experts_per_tok
        self.balance: Callable[..., torch.Tensor] = sys.modules[
            type(model).__module__
        ].load_balancing_loss_func

    def forward(self, state: RoutedState) -> Any:  # type: ignore[override]
        """The model's output; what a readout returns gets the auxiliary loss as ``aux_loss``."""
        if "readout" in state["loss_kwargs"]:
            made = super().forward(state)
            if state["router_logits"] is not None:
                made.aux_loss, _ = self._auxiliary(state)
            return made
        logits, loss = self.logits_and_loss(state)
        if state["router_logits"] is None:
            return self.output_class(loss=loss, logits=logits)
        auxiliary, router_logits = self._auxiliary(state)
        if loss is not None:
            loss = loss + self.coefficient * auxiliary
        return self.output_class(
            loss=loss, aux_loss=auxiliary, logits=logits, router_logits=router_logits
        )

    def _auxiliary(self, state: RoutedState) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        router_logits = _links(state["router_logits"])
        choice = KeptChoice()
        with choice:
            auxiliary = self.balance(
                router_logits, self.num_experts, self.num_chosen, state["attention_mask"]
            )
        choice.save()
        return auxiliary, router_logits


def split_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """As for every causal language model, but whole if the auxiliary loss is wanted.

    That is a product of two means over the batch, which no sum over parts of it gives.
    """
    named = by_name(type(model), args, kwargs)
    if n > 1 and wants_auxiliary_loss(model.config, named.get("output_router_logits")):
        warnings.warn(
            "output_router_logits: the auxiliary loss depends on all rows together, so the batch "
            "is one microbatch",
            stacklevel=2,
        )
        n = 1
    return causal_lm.split_batch(model, (), named, n)


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
