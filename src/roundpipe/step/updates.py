"""Updates of single masters: decided by an optimizer's ``step``, computed later in one pass over
memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels import native
from ..kernels.chunks import chunks
from ..params.masters import Master
from ..params.placement.newest import PendingUpdates, UpdateInto, do_all
from . import context

BLOCK = 256  # a chunk is a whole number of them, but for the last
_SMALLEST_PIECE = 1 << 16
_PIECE = 1 << 25  # elements updated at once on an accelerator: their gradients in fp32 take 128 MiB


class Rule(Protocol):
    """What happens to each element, hyper-parameters included. Must be elementwise: it is given
    chunks."""

    def apply(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
    ) -> None:
        """Updates chunks (flat) of masters and their states in place. Gradients are fp32 and not to
        be written."""

    def formula(self) -> native.Formula | None:
        """The same for the one-pass kernel; None if that has no such rule, which then runs on the
        CPU only."""


class RuleUpdate(NamedTuple):
    """An update by a rule. ``parts`` add up to the gradient, which is multiplied by ``scale``
    first.

    Tensors of the state may have any dtype the rule can handle; they have an element for each of
    the master's, or one for each ``BLOCK`` in a row.
    """

    weight: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    parts: tuple[torch.Tensor, ...]
    scale: float
    seen: bool
    rule: Rule

    @property
    def can_move(self) -> bool:
        return self.rule.formula() is not None and all(
            map(_is_plain_fp32, (self.weight, *self.moments))
        )

    def moved(self, weight: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> "RuleUpdate":
        parts = tuple(part.to(weight.device) for part in self.parts)
        return self._replace(weight=weight, moments=moments, parts=parts)


def update_of(master: Master, moments: tuple[torch.Tensor, ...], rule: Rule) -> RuleUpdate:
    """The update of a master by the gradient that it has now."""
    return RuleUpdate(
        master, moments, master.offloaded(), master.scale, master.is_gradient_seen, rule
    )


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
    """Writes masters, state and the working copies given. Blocks; the interpreter is free
    meanwhile.

    On the CPU one that raises keeps none of the others from being done: the first error is raised
    when they are.
    """
    with torch.no_grad():
        if len(updates) == 1:
            _compute_alone(updates[0])
        elif not _are_done_together(updates):
            do_all(partial(_compute_alone, each) for each in updates)


def _are_done_together(updates: Sequence[UpdateInto]) -> bool:
    """False, with nothing done, if each is to be computed alone."""
    try:
        if _by_kernel(updates):
            return True
    except Exception:
        return False  # because one of them cannot be done: that raises again when it is alone
    if any(each.update.weight.device.type == "cpu" for each in updates):
        return False
    _on_accelerator(updates)
    return True


def _compute_alone(each: UpdateInto) -> None:
    if _by_kernel([each]):
        return
    if each.update.weight.device.type == "cpu":
        _in_chunks(*each)
    else:
        _on_accelerator([each])


def _by_kernel(updates: Sequence[Any]) -> bool:
    """All of them in one pass; False, with nothing done, if there is one that the kernel cannot
    do."""
    kernel = native.library()
    rules: dict[int, Rule] = {
        id(update.rule): update.rule for update, _ in updates
    }  # many have the same
    found = {key: rule.formula() for key, rule in rules.items()}
    formulas = {key: formula for key, formula in found.items() if formula is not None}
    if kernel is None or len(formulas) < len(rules):
        return False
    jobs = [
        (formulas[id(rule)], scale, (weight, *moments), parts, working)
        for (weight, moments, parts, scale, _, rule), working in updates
    ]
    return native.update(kernel, jobs)


class _Piece(NamedTuple):
    """Some elements of an update whose tensors are on a device: ``num_elements`` from ``start``
    on."""

    update: RuleUpdate
    working: torch.Tensor | None
    start: int
    num_elements: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.num_elements == tensor.numel():
            return tensor  # because taking it apart takes longer than most tensors' updates
        return tensor.view(-1)[self.start : self.start + self.num_elements]

    def cut(self, size: int) -> "list[_Piece]":
        starts = range(0, self.num_elements, size)
        return [
            self._replace(
                start=self.start + start, num_elements=min(size, self.num_elements - start)
            )
            for start in starts
        ]


def _on_accelerator(updates: Sequence[UpdateInto]) -> None:
    """Many tensors in each operation, because queueing one takes longer than most tensors do."""
    batches: dict[tuple[int, float], list[_Piece]] = {}
    for update, working in updates:
        pieces = _Piece(update, working, 0, update.weight.numel()).cut(_PIECE)
        batches.setdefault((id(update.rule), update.scale), []).extend(pieces)
    for batch in batches.values():
        for pieces in _portions(batch):
            _together(pieces)


def _portions(batch: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """So many pieces at once that their gradients in fp32 stay small."""
    portion: list[_Piece] = []
    count = 0
    for piece in batch:
        if portion and count + piece.num_elements > _PIECE:
            yield portion
            portion, count = [], 0
        portion.append(piece)
        count += piece.num_elements
    yield portion


def _together(pieces: Sequence[_Piece]) -> None:
    """Pieces with one rule and one scale. Where memory is short, some at a time: an update is not
    left half done."""
    weights = [piece.of(piece.update.weight) for piece in pieces]
    gradients = _like(weights)
    if gradients is None:
        if len(pieces) == 1 and pieces[0].num_elements <= _SMALLEST_PIECE:
            raise torch.OutOfMemoryError(
                f"the update of {pieces[0].num_elements} elements needs 4 bytes for each; the "
                "device has no room for it"
            )
        size = max(max(piece.num_elements for piece in pieces) // 2, _SMALLEST_PIECE)
        for smaller in chain.from_iterable(piece.cut(size) for piece in pieces):
            _together([smaller])
        return
    torch._foreach_copy_(gradients, [piece.of(piece.update.parts[0]) for piece in pieces])
    for gradient, piece in zip(gradients, pieces, strict=True):
        for part in piece.update.parts[1:]:
            gradient.add_(piece.of(part))
    update = pieces[0].update
    if update.scale != 1.0:
        torch._foreach_mul_(gradients, update.scale)
    update.rule.apply(
        weights, gradients, [[piece.of(m) for m in piece.update.moments] for piece in pieces]
    )
    written = [
        (piece.of(piece.working), w)
        for piece, w in zip(pieces, weights, strict=True)
        if piece.working is not None
    ]
    if written:
        targets, sources = map(list, zip(*written, strict=True))
        torch._foreach_copy_(targets, sources)


def _like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """None if there is no memory for them."""
    try:
        return [torch.empty_like(tensor) for tensor in tensors]
    except torch.OutOfMemoryError:
        return None


def _is_plain_fp32(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def _in_chunks(update: Any, working: torch.Tensor | None) -> None:
    weight = update.weight.data.view(-1)
    moments = [moment.view(-1) for moment in update.moments]
    target = working.data.view(-1) if working is not None and working.is_contiguous() else None
    for where, gradient in chunks(update.parts, update.scale):
        pieces = [_piece(moment, where, weight.numel()) for moment in moments]
        update.rule.apply([weight[where]], [gradient], [pieces])
        if target is not None:
            target[where].copy_(weight[where])
    if working is not None and target is None:
        working.data.copy_(update.weight.data)


def _piece(moment: torch.Tensor, where: slice, count: int) -> torch.Tensor:
    return (
        moment[where]
        if moment.numel() == count
        else moment[where.start // BLOCK : -(-where.stop // BLOCK)]
    )
