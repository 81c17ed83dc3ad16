"""Stacked experts of transformers, computed in groups of the tokens that chose them.

It is what transformers computes with ``experts_implementation="grouped_mm"``, in fewer passes over
the rows: of experts on other devices shares are masked, not rows, and the backward adds up a
token's copies in one sum, where indexing's own adds each to the token's place.
"""

from functools import cache
from inspect import getclosurevars
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...device.facts import has_grouped_products
from .low_rank import AdaptedWeight
from .product import grouped_product


def group_experts(replica: nn.Module) -> None:
    """Has a replica compute its experts here, where transformers would in groups. The class of the
    replica's module is another, so nobody else's module is touched."""
    for module in replica.modules():
        if _is_stack(module):
            kind: Any = type(module)
            module.__class__ = _grouped(kind)


def _is_stack(module: nn.Module) -> bool:
    """Says whether transformers chooses how it computes, by its decorator's attributes and
    forward."""
    has = vars(module).keys()
    wanted = {"config", "has_gate", "has_bias", "is_transposed", "num_experts"}
    return has >= wanted and "forward" not in has and _ways_of(type(module)) is not None


def _ways_of(kind: Any) -> Any:
    """Finds what the decorator's forward chooses from; None if ``kind`` has a forward of its own,
    as a user's class made of transformers' may."""
    forward = kind.forward
    is_function = isinstance(forward, FunctionType)
    return getclosurevars(forward).nonlocals.get("experts_interface") if is_function else None


@cache
def _grouped(kind: Any) -> Any:
    """Makes a class of experts that compute here, of ``kind``, one of transformers'."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    ways, their_forward = _ways_of(kind), kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_grouped = self.config._experts_implementation == "grouped_mm"
        # Quantized experts have another function of that name, and a user may register one, or
        # patch the class while replicas wait to be used again.
        is_own = ways["grouped_mm"] is grouped_mm_experts_forward and kind.forward is their_forward
        is_theirs = is_grouped and is_own
        is_here = is_theirs and has_grouped_products(self.down_proj.device)
        return (_run_in_groups if is_here else kind.forward)(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _run_in_groups(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Returns (tokens, width): what each token's experts make of it, added up by their weights.

    Args:
        self: the experts module.
        hidden_states: (tokens, width).
        top_k_index: (tokens, chosen), the numbers of the experts; one past the last is nobody's.
        top_k_weights: (tokens, chosen).
    """
    num_tokens, num_chosen = top_k_index.shape
    # A product leaves rows of nobody as memory was. So somebody computes them, and counts nothing.
    top_k_weights = top_k_weights.masked_fill(top_k_index >= self.num_experts, 0)
    experts, order = top_k_index.clamp(max=self.num_experts - 1).reshape(-1).sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(self.num_experts, device=order.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)

    def product(rows: Tensor, name: str) -> Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        made = _product(rows, weight if self.is_transposed else weight.transpose(-2, -1), ends)
        return made if bias is None else made + bias[experts]

    rows = _Moved.apply(hidden_states, order, place, num_chosen)
    if self.has_gate:
        inner = self._apply_gate(product(rows, "gate_up_proj"))
    else:
        inner = self.act_fn(product(rows, "up_proj"))
    made = _Moved.apply(product(inner, "down_proj"), place, order, 1)
    weighted: Tensor = made * top_k_weights.reshape(-1, 1)
    return weighted.view(num_tokens, num_chosen, -1).sum(1).to(hidden_states.dtype)


def _product(rows: Tensor, weight: Any, ends: Tensor) -> Tensor:
    rows = rows.to(weight.dtype)  # because autocast leaves these products alone
    if isinstance(weight, AdaptedWeight):
        return weight.grouped_product(rows, ends)
    return grouped_product(rows, weight, ends)


class _Moved(torch.autograd.Function):
    """Rows in another order: row ``i`` is row ``order[i] // copies`` of the input. ``place`` is the
    inverse of ``order``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return rows[order // copies]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        moved = gradient[place]
        if ctx.copies > 1:
            moved = moved.view(-1, ctx.copies, moved.shape[-1]).sum(1)
        return moved, None, None, None
