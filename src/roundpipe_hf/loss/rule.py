"""How the losses of microbatches make up the loss of their batch. Knows nothing of the engine or of
Trainer.

[Note: loss rules] For a batch cut in microbatches i, a loss is one of, or the sum of:

    a part divided by the window's          L = a(N) = sum of a_i(N)     causal LM, smoothing
    number of items N
    a mean over something each microbatch   L = b    = sum of w_i * b_i  regression, plain means
    has w_i of

a halves where N doubles and b does not, which tells them apart: a = 2 (L(N) - L(2N)), b = 2 L(2N) -
L(N). What the mean is over is found by trying what it could be. Where neither form reproduces the
batch's loss its rows depend on each other (contrastive losses, load balancing): such a batch is not
cut, which is always right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from roundpipe.microbatch import batch_size_of

from .sample import rows_at

# Relative to the loss. Below fp32 it moves where kernels add up one row in another order than two.
TOLERANCE, TOLERANCE_BELOW_FP32 = 1e-5, 1e-4


class MeanOver(Enum):
    """What a mean counts, in the order of preference where they agree."""

    TARGETS = "targets"  # labels that are predicted: shifted ones for a causal model
    LABELS = "labels"
    ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """How to weigh the losses of microbatches ([Note: loss rules])."""

    can_cut: bool = True
    has_sum: bool = True
    mean_over: MeanOver | None = None


ADDS_UP = LossRule()
KEEP_WHOLE = LossRule(can_cut=False)


def either(one: LossRule, other: LossRule) -> LossRule:
    """The rule of a loss that has the form of ``one`` or of ``other``, or parts of both."""
    over = {rule.mean_over for rule in (one, other)} - {None}
    if not (one.can_cut and other.can_cut) or len(over) > 1:
        return KEEP_WHOLE
    return LossRule(has_sum=one.has_sum or other.has_sum, mean_over=over.pop() if over else None)


class Evaluated(NamedTuple):
    """One sample's loss with the number of items given, and with twice that (None where none is
    given)."""

    once: float
    twice: float | None

    @property
    def total(self) -> float:
        return 0.0 if self.twice is None else 2 * (self.once - self.twice)

    @property
    def mean(self) -> float:
        return self.once if self.twice is None else 2 * self.twice - self.once


Measure = Callable[[Mapping[str, Any], MeanOver], float | None]
"""How much of what a mean counts a batch has; None if it has no such thing."""


def learn_rule(
    sample: Mapping[str, Any],
    evaluate: Callable[[Mapping[str, Any]], Evaluated],
    measure: Measure,
    tolerance: float = TOLERANCE,
) -> LossRule | None:
    """Finds the rule of a loss by evaluating it on the rows of ``sample``, together and apart.

    Returns None where these cannot tell: no valid label, rows with equal losses.
    """
    rows = [rows_at(sample, [row]) for row in range(batch_size_of((), dict(sample)) or 0)]
    whole, *parts = [evaluate(inputs) for inputs in (sample, *rows)]
    weights = {
        over: shares
        for over in MeanOver
        if (shares := _shares(sample, rows, over, measure)) is not None
    }
    return decide_rule(whole, parts, weights, tolerance)


def decide_rule(
    whole: Evaluated,
    parts: Sequence[Evaluated],
    weights: Mapping[MeanOver, Sequence[float]],
    tolerance: float = TOLERANCE,
) -> LossRule | None:
    """Which rule reproduces the loss of ``whole`` from those of its ``parts``; ``weights`` are what
    could count."""
    values = torch.tensor([value for one in (whole, *parts) for value in (one.total, one.mean)])
    if not bool(values.isfinite().all()):
        return None
    scale = max(abs(whole.once), 1e-12)

    def equal(a: float, b: float) -> bool:
        return abs(a - b) <= tolerance * scale

    if not equal(whole.total, sum(part.total for part in parts)):
        return KEEP_WHOLE
    if all(equal(part.mean, 0.0) for part in (whole, *parts)):
        return ADDS_UP
    fitting = [
        over
        for over, shares in weights.items()
        if equal(
            whole.mean, sum(share * part.mean for share, part in zip(shares, parts, strict=True))
        )
    ]
    if not fitting:
        return KEEP_WHOLE
    if any(not _agree(weights[over], weights[fitting[0]]) for over in fitting):
        return None
    has_sum = not all(equal(part.total, 0.0) for part in (whole, *parts))
    return LossRule(has_sum=has_sum, mean_over=fitting[0])


def _agree(shares: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(a - b) <= TOLERANCE for a, b in zip(shares, others, strict=True))


def weighted(
    rule: LossRule, weight: float, evaluate: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """A microbatch's share of the batch's loss. ``evaluate(k)`` is its loss with k times the number
    of items."""
    if rule.mean_over is None:
        return evaluate(1)
    if not rule.has_sum:
        return evaluate(1) * weight
    once, twice = evaluate(1), evaluate(2)
    return 2 * (once - twice) + weight * (2 * twice - once)


def _shares(
    sample: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], over: MeanOver, measure: Measure
) -> list[float] | None:
    whole = measure(sample, over)
    if not whole:
        return None
    return [(measure(row, over) or 0.0) / whole for row in rows]
