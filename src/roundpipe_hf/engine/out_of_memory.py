"""What is tried where a device runs out of memory. The batch, its loss and its update stay what
they were.

[Note: running out] A failed engine call has no effect, so it can be made again with a smaller
*footprint*: first without kept graphs, then with more microbatches, then a smaller grain of
recompute, then one round for each batch of an accumulation window. What worked is kept for later
calls. A smaller batch is another run: only Trainer's ``auto_find_batch_size`` does that, and only
where even the smallest footprint does not fit.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from roundpipe import RoundPipe
from roundpipe.config import RecomputeGrain
from roundpipe.errors import PlanError, clear_frames

from ..compat import should_reduce_batch_size

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """How a call uses device memory.

    Args:
        num_microbatch: microbatches per batch.
        recompute_grain: as in `RoundPipeRunConfig`.
        is_joined: whether all batches of a window share one round, their kept inputs being alive at
            the same time.
        keeps_graphs: as in `RoundPipeRunConfig`.
    """

    num_microbatch: int
    recompute_grain: RecomputeGrain
    is_joined: bool
    keeps_graphs: bool = False

    def smaller(self, most_microbatches: int) -> "Footprint | None":
        """The next thing to try; None if nothing is left. See [Note: running out]."""
        if self.keeps_graphs:
            return replace(self, keeps_graphs=False)
        if self.num_microbatch < most_microbatches:
            return replace(self, num_microbatch=min(2 * self.num_microbatch, most_microbatches))
        if self.recompute_grain == "stage":
            return replace(self, recompute_grain="layer")
        return replace(self, is_joined=False) if self.is_joined else None

    def changes_from(self, other: "Footprint") -> str:
        """What is different here, as a user would write it."""
        changes = {
            f"num_microbatch={self.num_microbatch}": self.num_microbatch != other.num_microbatch,
            f"recompute_grain={self.recompute_grain!r}": self.recompute_grain
            != other.recompute_grain,
            "graphs made again in the backward": self.keeps_graphs != other.keeps_graphs,
            "one round for each batch of an accumulation window": self.is_joined != other.is_joined,
        }
        return ", ".join(change for change, is_made in changes.items() if is_made)


class OutOfMemoryBackoff:
    """Makes calls of one kind, with the largest footprint that has not failed yet. Used by the
    user's thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._reached: weakref.WeakKeyDictionary[RoundPipe, Footprint] = weakref.WeakKeyDictionary()

    def run(
        self,
        engine: RoundPipe,
        start: Footprint,
        most_microbatches: Callable[[], int],
        attempt: Callable[[Footprint], T],
    ) -> T:
        """What ``attempt`` returns. Raises its last error, if nothing is left to try.

        Args:
            start: the footprint to begin with, if none was too large yet.
            most_microbatches: into how many a batch can be cut.
        """
        first = footprint = self._reached.get(engine, start)
        while True:
            try:
                result = attempt(footprint)
            except Exception as error:
                smaller = (
                    footprint.smaller(most_microbatches()) if is_out_of_memory(error) else None
                )
                if smaller is None:
                    raise
                _release(engine, error)
            else:
                if footprint is not first:
                    self._reached[engine] = footprint
                    logger.warning(
                        "%s ran out of device memory with num_microbatch=%d; it goes on with %s, "
                        "which changes neither the batch nor its loss",
                        self._what,
                        first.num_microbatch,
                        footprint.changes_from(first),
                    )
                return result
            footprint = smaller


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller footprint may help: a device said so, or the planner found that nothing
    fits."""
    return isinstance(error, torch.OutOfMemoryError | PlanError) or should_reduce_batch_size(error)


class EvaluationOutOfMemory(torch.OutOfMemoryError):
    """Evaluation does not fit, however finely its batches are cut.

    Of two arguments, which is how accelerate's batch size finder knows that a smaller *training*
    batch would not help.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


def _release(engine: RoundPipe, error: BaseException) -> None:
    """Frees what the failed call held on devices: through the error's frames, and in the
    allocators' caches."""
    clear_frames(error)
    for device in engine.devices:
        device.trim()
