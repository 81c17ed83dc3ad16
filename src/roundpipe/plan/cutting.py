"""A cut of the layers into stages, and the cuts next to it. Knows nothing of time or memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from .actions import Pass, Passes
from .schedule import forward_passes


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Forward stages ascending over ``[0, a)``, then backward stages descending; the first backward
    stage is fused."""

    forward: tuple[range, ...]
    backward: tuple[range, ...]


class Sizes(NamedTuple):
    """A cut as layers per stage, both directions counted from the first layer up (backward: from
    the last stage run).

    ``backward`` begins at the first trained layer: what lies below is never visited backward.
    """

    forward: tuple[int, ...]
    fused: int
    backward: tuple[int, ...]

    def stages(self, num_layers: int, first_trained: int) -> Stages:
        """Complete stages. Frozen layers at the bottom belong to the last backward stage; its stage
        run leaves them out."""
        forward = _ranges(self.forward, 0)
        backward = _ranges(self.backward, first_trained)
        fused = range(num_layers - self.fused, num_layers)
        if backward:
            backward[0] = range(backward[0].stop)
        elif fused.start:
            backward = [range(fused.start)]
        return Stages(forward=tuple(forward), backward=(fused, *reversed(backward)))

    def passes(self, num_layers: int, first_trained: int) -> Passes:
        """The stage runs of those stages, without making them."""
        return [
            *forward_passes(_ranges(self.forward, 0)),
            (Pass.FUSED, range(num_layers - self.fused, num_layers)),
            *(
                (Pass.BACKWARD, layers)
                for layers in reversed(_ranges(self.backward, first_trained))
            ),
        ]

    def neighbours(self, first_trained: int) -> Iterator["Sizes"]:
        """Cuts that differ by the place of one layer in one direction, or by one fused layer."""
        for forward in _transfers(self.forward):
            yield self._replace(forward=forward)
        for backward in _transfers(self.backward):
            yield self._replace(backward=backward)
        for fused in (self.fused - 1, self.fused + 1):
            below = sum(self.forward) + self.fused - fused
            if fused and below >= 0:
                # The fused stage may reach below what trains; then its layers are in no backward
                # stage.
                change = max(below - first_trained, 0) - sum(self.backward)
                for forward in _resized(self.forward, self.fused - fused):
                    for backward in _resized(self.backward, change):
                        yield Sizes(forward, fused, backward)


def _transfers(stages: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One layer from any stage to any other; an emptied stage goes, and one may come at either
    end."""
    for taken in range(1, len(stages) + 1):
        for given in range(len(stages) + 2):
            if given != taken:
                changed = [0, *stages, 0]
                changed[taken] -= 1
                changed[given] += 1
                yield tuple(filter(None, changed))


def _resized(stages: tuple[int, ...], change: int) -> Iterator[tuple[int, ...]]:
    """``change`` layers more or less, by one at most, in the first stage or in the one next to the
    fused one."""
    if not stages or not change:
        yield (*stages, change) if change else stages
        return
    for stage in sorted({0, len(stages) - 1}):
        yield tuple(filter(None, (*stages[:stage], stages[stage] + change, *stages[stage + 1 :])))


def _ranges(sizes: Sequence[int], start: int) -> list[range]:
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=start))]
