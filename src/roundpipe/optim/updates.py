"""Updates of single masters: decided by an optimizer's ``step``, computed later in one pass over memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..params.copies import Master
from ..params.pending import PendingUpdates, UpdateInto
from . import context, native
from .chunks import chunks

BLOCK = 256  # a chunk is a whole number of them, but for the last


class Rule(Protocol):
    """What happens to each element, hyper-parameters included. Must be elementwise: it is given chunks."""

    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, moments: Sequence[torch.Tensor]) -> None:
        """Updates chunks (flat) of a master and its state in place. ``gradient`` is fp32 and not to be written."""

    def formula(self) -> native.Formula | None:
        """The same for the one-pass kernel; None if that has no such rule."""


class RuleUpdate(NamedTuple):
    """An update by a rule. ``parts`` add up to the gradient, which is multiplied by ``scale`` first.

    Tensors of the state may have any dtype the rule can handle; they have an element for each of the master's, or one
    for each ``BLOCK`` in a row.
    """

    weight: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    parts: tuple[torch.Tensor, ...]
    scale: float
    seen: bool
    rule: Rule


def update_of(master: Master, moments: tuple[torch.Tensor, ...], rule: Rule) -> RuleUpdate:
    """The update of a master by the gradient that it has now."""
    return RuleUpdate(master, moments, master.landed(), master.scale, master.is_gradient_seen, rule)


def record(updates: Sequence[RuleUpdate]) -> None:
    """Leaves the updates to the optimizer thread's one pass. Called in an optimizer's ``step``."""
    step = context.current_step()
    if step is None:
        compute([UpdateInto(update, None) for update in updates])
    else:
        step.updates.add(updates)


def pending_updates() -> PendingUpdates:
    """For the step that the calling thread begins."""
    return PendingUpdates(compute)


def compute(updates: Sequence[UpdateInto]) -> None:
    """Writes masters, state and the working copies given. Blocks; the interpreter is free meanwhile."""
    if _by_kernel(updates):
        return
    with torch.no_grad():
        for each in updates:
            if len(updates) == 1 or not _by_kernel([each]):
                _in_chunks(*each)


def _by_kernel(updates: Sequence[Any]) -> bool:
    """All of them in one pass; False, with nothing done, if there is one that the kernel cannot do."""
    kernel = native.library()
    rules: dict[int, Rule] = {id(update.rule): update.rule for update, _ in updates}  # many have the same
    found = {key: rule.formula() for key, rule in rules.items()}
    formulas = {key: formula for key, formula in found.items() if formula is not None}
    if kernel is None or len(formulas) < len(rules):
        return False
    jobs = [
        (formulas[id(rule)], scale, (weight, *moments), parts, working)
        for (weight, moments, parts, scale, _, rule), working in updates
    ]
    return native.update(kernel, jobs)


def _in_chunks(update: Any, working: torch.Tensor | None) -> None:
    weight = update.weight.data.view(-1)
    moments = [moment.view(-1) for moment in update.moments]
    target = working.data.view(-1) if working is not None and working.is_contiguous() else None
    for where, gradient in chunks(update.parts, update.scale):
        update.rule.apply(weight[where], gradient, [_piece(moment, where, weight.numel()) for moment in moments])
        if target is not None:
            target[where].copy_(weight[where])
    if working is not None and target is None:
        working.data.copy_(update.weight.data)


def _piece(moment: torch.Tensor, where: slice, count: int) -> torch.Tensor:
    return moment[where] if moment.numel() == count else moment[where.start // BLOCK : -(-where.stop // BLOCK)]
