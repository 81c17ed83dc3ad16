"""What planning knows: the numbers of a model's layers, and the round that is planned for. No
opinion about either."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import inf
from typing import Literal

from .actions import Pass

Grain = Literal["stage", "layer"]
# Of the 28 bytes that an update moves for each parameter, 2 are its gradient.
_SHARE_READ = 2 / 28


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Per layer, for one microbatch. What is left out counts as nothing; ``recompute`` as a
    forward, ``offloaded_bytes`` as ``gradient_bytes``, ``upload_bytes`` as ``weight_bytes``.

    Args:
        forward, recompute, backward: milliseconds; backward without the recompute before it.
        weight_bytes: what a slot holds.
        upload_bytes: what an upload moves; less than that for quantized weights.
        gradient_bytes: its accumulators on the device.
        offloaded_bytes: what of them goes down, in the dtype they offload in.
        saved_bytes: what autograd keeps of its forward.
        passing_bytes: the largest gradient inside it, alive only while its backward runs.
        input_bytes: the boundary that goes into it.
        up_ms_per_byte, down_ms_per_byte: of copies to and from a device, each over a lane of their
            own.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    upload_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    offloaded_bytes: tuple[int, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    passing_bytes: tuple[int, ...] = ()
    input_bytes: tuple[int, ...] = ()
    up_ms_per_byte: float = 0.0
    down_ms_per_byte: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", self.recompute or self.forward)
        object.__setattr__(self, "offloaded_bytes", self.offloaded_bytes or self.gradient_bytes)
        object.__setattr__(self, "upload_bytes", self.upload_bytes or self.weight_bytes)
        for name in (
            "weight_bytes",
            "upload_bytes",
            "offloaded_bytes",
            "gradient_bytes",
            "saved_bytes",
            "passing_bytes",
            "input_bytes",
        ):
            object.__setattr__(self, name, getattr(self, name) or (0,) * self.num_layers)
        lengths = {
            f.name: len(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), tuple)
        }
        assert set(lengths.values()) == {self.num_layers}, lengths

    @property
    def num_layers(self) -> int:
        return len(self.forward)

    def by_layer(self) -> "LayerCosts":
        """With grain "layer" a recompute is two runs of a layer: one to reach it, one for its
        backward."""
        return replace(self, recompute=tuple(2 * ms for ms in self.recompute))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a plan is made for.

    Args:
        overlaps: the next round's forwards may run beside this round's last backward stage runs
            (async steps).
        first_trained: nothing below this layer needs a backward.
        limit_bytes: what one device may hold.
        min_stages: at least so many stage runs, while there are layers for them.
        may_share: a stage may be visited several times, each time for a share of the microbatches.
            Its gradients are then summed in another order than on one device.
        optimizer_ms: what an update takes. After a round that stands alone; beside the next one if
            rounds overlap.
        keeps_layers: weights that no step changes may stay on devices, in what a plan leaves of the
            limit.
    """

    num_devices: int
    num_microbatches: int
    overlaps: bool = True
    grain: Grain = "stage"
    first_trained: int = 0
    limit_bytes: float = inf
    min_stages: int = 1
    may_share: bool = False
    optimizer_ms: float = 0.0
    keeps_layers: bool = False

    def of_share(self, num_shares: int) -> "Workload":
        """What is left to plan for each of ``num_shares`` groups of devices, the one with the most
        microbatches."""
        return replace(
            self,
            num_devices=self.num_devices // num_shares,
            num_microbatches=-(-self.num_microbatches // num_shares),
        )

    def step_ms(self, round_ms: float, num_shares: int = 1) -> float:
        """From step to step, the update in it, which reads a gradient for every share."""
        update_ms = self.optimizer_ms * (1 + (num_shares - 1) * _SHARE_READ)
        return max(round_ms, update_ms) if self.overlaps else round_ms + update_ms


class StageSums:
    """Sums over runs of consecutive layers, each in two look-ups."""

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs
        self.forward = sums(costs.forward)
        self.again = sums([r + b for r, b in zip(costs.recompute, costs.backward, strict=True)])
        self.fused = sums([f + b for f, b in zip(costs.forward, costs.backward, strict=True)])
        self.weights = sums(costs.weight_bytes)
        self.uploads = sums(costs.upload_bytes)
        self.gradients = sums(costs.gradient_bytes)
        self.offloaded = sums(costs.offloaded_bytes)
        self.saved = sums(costs.saved_bytes)
        self.inputs = sums(costs.input_bytes)
        # A gradient that comes in and the one made of it are there at once; where weights train,
        # the activation that was kept for them goes in between.
        trains = [
            2 * offloaded >= own
            for offloaded, own in zip(costs.offloaded_bytes, costs.weight_bytes, strict=True)
        ]
        self.passing = [n if t else 2 * n for n, t in zip(costs.passing_bytes, trains, strict=True)]
        self._of_pass = {
            Pass.FORWARD: self.forward,
            Pass.FUSED: self.fused,
            Pass.BACKWARD: self.again,
        }

    def compute_ms(self, pass_: Pass, layers: range) -> float:
        """One microbatch of a stage run, on the compute lane."""
        totals = self._of_pass[pass_]
        return totals[layers.stop] - totals[layers.start]

    def stage_run_ms(self, pass_: Pass, layers: range, num_microbatches: int) -> float:
        """One microbatch's share of a stage run: the larger of its compute and its copies."""
        costs = self.costs
        up = (self.uploads[layers.stop] - self.uploads[layers.start]) * costs.up_ms_per_byte
        down = 0.0
        if pass_ is not Pass.FORWARD:
            down = (
                self.offloaded[layers.stop] - self.offloaded[layers.start]
            ) * costs.down_ms_per_byte
        return max(self.compute_ms(pass_, layers), up / num_microbatches, down / num_microbatches)


def sums(values: Sequence[float]) -> list[float]:
    """``sums(v)[j] - sums(v)[i]`` is the sum of ``v[i:j]``."""
    return [0.0, *accumulate(values)]
