"""Which rows of a batch a loss is asked about: a few that differ in what it may weigh them by.
Knows nothing of losses.

[Note: traits] A mean may weigh rows by their class, or by a column of the data set. As long as rows
are alike in that, it looks like a plain mean. So rows are chosen that show as many *traits* as
possible, and a batch with a trait that no sample has shown is a reason to ask again. A number that
is no class has two: the batch's least, or more than that.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from roundpipe.microbatch import batch_size_of

Trait = tuple[str, int | bool]

LABELS = ("labels", "shift_labels")
IGNORED = -100
_MOST_ROWS = 4
# Of tokens. With more it is a vocabulary, of which any two rows show different ones.
_MOST_CLASSES = 32
# How many labels each row of a sample keeps: of those that all have, and at least. Far apart, so
# that weighting by tokens and by rows cannot be confused; and, with one more or less too, no
# multiples of other such numbers, so that nothing that leaves some of them out looks like either.
_KEPT = ((0.3, 4), (0.9, 11), (0.6, 7), (1.0, 12))


def traits_of(batch: Mapping[str, Any]) -> list[set[Trait]]:
    """By row. See [Note: traits]."""
    size = batch_size_of((), dict(batch)) or 0
    traits: list[set[Trait]] = [set() for _ in range(size)]
    for name, column in batch.items():
        if isinstance(column, torch.Tensor) and column.ndim in (1, 2) and column.size(0) == size:
            for own, values in zip(traits, _values(name, column), strict=True):
                own.update((name, value) for value in values if value != IGNORED)
    return traits


def telling_rows(batch: Mapping[str, Any], shown: Collection[Trait] = ()) -> list[int]:
    """Two rows that differ, more if those show more traits. Traits not among ``shown`` come first,
    then many labels. None if there are not two rows."""
    traits = traits_of(batch)
    if len(traits) < 2:
        return []
    counts = _label_counts(batch, len(traits))
    chosen: list[int] = []
    in_sample: set[Trait] = set()

    def score(row: int) -> tuple[int, int, int, int]:
        new = traits[row] - in_sample
        return len(new.difference(shown)), len(new), counts[row], -row

    while len(chosen) < min(_MOST_ROWS, len(traits)):
        best = max((row for row in range(len(traits)) if row not in chosen), key=score)
        if len(chosen) >= 2 and not traits[best] - in_sample:
            break
        chosen.append(best)
        in_sample |= traits[best]
    return chosen


def sample_of(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Those rows of everything that has rows, their labels cut to different numbers."""
    sample = rows_at(batch, rows)
    for name in LABELS:
        labels = sample.get(name)
        if isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point():
            common = int(labels.ne(IGNORED).sum(dim=1).min())
            numbers = [max(least, int(part * common)) for part, least in _KEPT]
            sample[name] = torch.stack(
                [_keep(row, number) for row, number in zip(labels, numbers, strict=False)]
            )
    return sample


def rows_at(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    size = batch_size_of((), dict(batch))
    index = torch.tensor(rows)

    def take(leaf: Any) -> Any:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.size(0) == size
        return leaf.index_select(0, index.to(leaf.device)) if is_cut else leaf

    taken: dict[str, Any] = tree_map(take, dict(batch))
    return taken


def _values(name: str, column: torch.Tensor) -> Sequence[Collection[Any]]:
    """What each row shows of a column."""
    if column.is_floating_point():
        return (
            [(more,) for more in (column > column.min()).tolist()]
            if column.ndim == 1
            else [()] * len(column)
        )
    if column.ndim == 1:
        return [(value,) for value in column.tolist()]
    are_classes = name in LABELS and column.numel() > 0 and int(column.max()) < _MOST_CLASSES
    return [row.unique().tolist() for row in column] if are_classes else [()] * len(column)


def _label_counts(batch: Mapping[str, Any], size: int) -> list[int]:
    for name in LABELS:
        labels = batch.get(name)
        if isinstance(labels, torch.Tensor) and labels.ndim == 2 and labels.size(0) == size:
            counts: list[int] = labels.ne(IGNORED).sum(dim=1).tolist()
            return counts
    return [0] * size


def _keep(labels: torch.Tensor, kept: int) -> torch.Tensor:
    """Masks all but ``kept`` valid labels: the row's first, which no causal model predicts, so that
    counts of labels and of targets differ; one of each class; others from all over the row."""
    (valid,) = labels.ne(IGNORED).nonzero(as_tuple=True)
    if not len(valid):
        return labels
    spread = valid[torch.linspace(0, len(valid) - 1, kept).round().long()].unique().tolist()
    values = labels[valid]
    classes = values.unique() if int(values.max()) < _MOST_CLASSES else values[:0]
    of_each = [int(valid[values.eq(value)][0]) for value in classes]
    chosen = torch.tensor(
        list(dict.fromkeys([int(valid[0]), *of_each, *spread]))[:kept], device=labels.device
    )
    few = torch.full_like(labels, IGNORED)
    few[chosen] = labels[chosen]
    few[0] = labels[valid[0]]
    return few
