"""Updates on an accelerator, by torch's kernels: many tensors in each operation, because queueing
one takes longer than most tensors do."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import do_all

if TYPE_CHECKING:
    from .updates import RuleUpdate, UpdateInto

_SMALLEST_PIECE = 1 << 16
_SQUARED_AT_ONCE = 1 << 22
_PIECE = 1 << 25  # elements updated at once: their gradients in fp32 take 128 MiB


class _Piece(NamedTuple):
    """Some elements of an update whose tensors are on a device: ``num_elements`` from ``start``
    on."""

    update: "RuleUpdate"
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


def update(updates: "Sequence[UpdateInto]") -> None:
    """Computes and returns once all is queued."""
    batches: dict[tuple[int, float], list[_Piece]] = {}
    for update, working in updates:
        pieces = _Piece(update, working, 0, update.weight.numel()).cut(_PIECE)
        batches.setdefault((id(update.rule), update.scale), []).extend(pieces)
    do_all(partial(_together, pieces) for batch in batches.values() for pieces in _portions(batch))


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
    """In one piece of memory, because asking for many takes longer than small updates. None if
    there is none."""
    try:
        whole = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    except torch.OutOfMemoryError:
        return None
    return list(torch._C._nn.unflatten_dense_tensors(whole, list(tensors)))


def sum_of_squares(parts: Sequence[torch.Tensor]) -> float:
    """Of gradients that stay on their device."""
    norms = []
    for pieces in zip(*(part.reshape(-1).split(_SQUARED_AT_ONCE) for part in parts), strict=True):
        norms.append(torch.linalg.vector_norm(sum(piece.float() for piece in pieces)))
    return float(torch.stack(norms).double().square().sum())
