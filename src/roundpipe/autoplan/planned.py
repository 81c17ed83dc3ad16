"""Which calls may use one plan, what such a call does, and the plans in use."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from ..plan.costs import Grain
from ..plan.execute_plan import ModelExecutePlan, RunType
from ..plan.memory import Peak
from .measurements import ShapeMeasurements

# Calls of a plan that are timed: not the first, in which things are compiled and allocated, then
# some, then few.
_TIMED_EARLY, _TIMED_EVERY = range(2, 5), 16


class Needs(NamedTuple):
    """Bytes: of inputs ``kept`` on all devices together, of all that is at most on one, of
    ``slots`` and the ``graph`` among that, and what may be there; and of inputs ``waiting`` on the
    host."""

    kept: int
    most: int
    slots: int
    graph: int
    allowed: float
    waiting: float = 0.0


class PlanKey(NamedTuple):
    """Calls that may use one plan: what makes another plan right is another key.

    ``tokens_at_once``: how many row-wise modules run for; 0 for all.
    """

    run_type: RunType
    num_microbatches: int
    grain: Grain
    shapes: Hashable
    wants_gradients: bool
    overlaps: bool
    trains: tuple[bool, ...]
    modes: tuple[bool, ...]
    chosen: ModelExecutePlan | None
    returns: bool
    tokens_at_once: int

    @property
    def forwards(self) -> Hashable:
        """Returns what decides, besides the model, whether forwards write to it."""
        return self.run_type, self.modes


class Planned(NamedTuple):
    """Says what a call that was to be as in ``plan_key`` does.

    ``spilled``: the layers whose kept inputs wait on the host. ``needs``: as predicted when the
    plan was looked at last. ``is_timed``: it is one of the few calls that are timed. ``is_sure``:
    needs were predicted from graphs that were measured.
    """

    plan_key: PlanKey
    plan: ModelExecutePlan
    spilled: frozenset[int]
    needs: Needs
    measured: ShapeMeasurements
    is_timed: bool
    is_sure: bool


@dataclass
class InUse:
    """A plan in use. It is looked at again after 1, 2, 4, ... calls in which measurements changed,
    for a microbatch that is larger than the ``elements`` it was made for, and after a shortage that
    it did not know of.

    ``round_ms``: of a round without its update, as predicted at that version of the measurements.
    """

    plan: ModelExecutePlan
    peak: Peak
    allowed: float
    known: Hashable
    elements: int
    shortages: int
    is_sure: bool
    patience: int = 1
    waited: int = 0
    calls: int = 0
    round_ms: tuple[int, float] | None = None

    def is_due(self, known: Hashable) -> bool:
        """Returns True if it has waited long enough since what is ``known`` changed."""
        return self.known != known and self.waited + 1 >= self.patience

    @property
    def needs(self) -> Needs:
        held = self.peak.bytes
        peak = self.peak
        return Needs(peak.kept, held.total, held.slots, held.graph, self.allowed, peak.waiting)

    @property
    def is_timed(self) -> bool:
        return self.calls in _TIMED_EARLY or self.calls % _TIMED_EVERY == 0
