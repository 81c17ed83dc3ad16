"""What planning knows: the numbers of a model's layers, and the round that is planned for. No opinion about either."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import inf
from typing import Literal

from .actions import Pass

Grain = Literal["stage", "layer"]


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Per layer, for one microbatch. What is left out counts as nothing; ``recompute`` as a forward.

    Args:
        forward, recompute, backward: milliseconds; backward without the recompute before it.
        weight_bytes: what an upload moves and a slot holds.
        gradient_bytes: its accumulators on the device.
        saved_bytes: what autograd keeps of its forward.
        passing_bytes: the largest gradient inside it, alive only while its backward runs.
        input_bytes: the boundary that goes into it.
        copy_ms_per_byte: of weights up and gradients down, over a lane of their own.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    passing_bytes: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    copy_ms_per_byte: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", self.recompute or self.forward)
        for name in ("weight_bytes", "gradient_bytes", "saved_bytes", "passing_bytes", "input_bytes"):
            object.__setattr__(self, name, getattr(self, name) or (0,) * self.num_layers)
        lengths = {f.name: len(getattr(self, f.name)) for f in fields(self) if f.name != "copy_ms_per_byte"}
        assert set(lengths.values()) == {self.num_layers}, lengths

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    def without_copies(self) -> "LayerCosts":
        return replace(self, copy_ms_per_byte=0.0)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a plan is made for.

    Args:
        overlaps: the next round's forwards may run beside this round's last backward visits (async steps).
        first_trained: nothing below this layer needs a backward.
        budget_bytes: what one device may hold.
        min_stages: at least so many visits, while there are layers for them.
    """

    num_devices: int
    num_microbatches: int
    overlaps: bool = True
    grain: Grain = "stage"
    first_trained: int = 0
    budget_bytes: float = inf
    min_stages: int = 1


class StageSums:
    """Sums over runs of consecutive layers, each in two look-ups."""

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        self.forward = sums(costs.forward)
        self.again = sums([r + b for r, b in zip(costs.recompute, costs.backward, strict=True)])
        self.fused = sums([f + b for f, b in zip(costs.forward, costs.backward, strict=True)])
        self.weights = sums(costs.weight_bytes)
        self.gradients = sums(costs.gradient_bytes)
        self.saved = sums(costs.saved_bytes)
        self.inputs = sums(costs.input_bytes)
        self._of_pass = {Pass.FORWARD: self.forward, Pass.FUSED: self.fused, Pass.BACKWARD: self.again}

    def compute_ms(self, pass_: Pass, layers: range) -> float:
        """One microbatch of a visit, on the compute lane."""
        totals = self._of_pass[pass_]
        return totals[layers.stop] - totals[layers.start]

    def visit_ms(self, pass_: Pass, layers: range, num_microbatches: int) -> float:
        """One microbatch's share of a visit: the larger of its compute and its copies."""
        compute = self.compute_ms(pass_, layers)
        rate = self.costs.copy_ms_per_byte
        if not rate:
            return compute
        moved = self.weights[layers.stop] - self.weights[layers.start]
        if pass_ is not Pass.FORWARD:
            moved = max(moved, self.gradients[layers.stop] - self.gradients[layers.start])
        return max(compute, moved * rate / num_microbatches)


def sums(values: Sequence[float]) -> list[float]:
    """``sums(v)[j] - sums(v)[i]`` is the sum of ``v[i:j]``."""
    return [0.0, *accumulate(values)]
