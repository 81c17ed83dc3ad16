"""Decides whether calls run modules that compute each token by itself for some tokens at a time:
where nothing else makes them fit."""

from collections.abc import Callable, Hashable
from dataclasses import replace

from ..plan.best import plan_peak, smallest_plan
from .cost_model import TOKENS_GUESSED
from .measurements import ShapeMeasurements
from .planned import InUse, PlanKey
from .problem import Problems

# Enough to keep a GPU's matrix units busy; inside of an 8B model's MLP they make 0.8 GB.
TOKENS_AT_ONCE = 4096
# So often a device may run out of memory before they are tried, whatever the prediction says.
_SHORTAGES_BELIEVED = 1


class Cutting:
    """Decides for a planner. Used by the caller's thread.

    Cut modules run once more, so a call is cut only if the smallest plan of the uncut one, with all
    kept inputs on the host, is too large by what is known, or by guesses, or if it has run out of
    memory again and again. It stays cut, and so are later calls at least as large.
    """

    def __init__(self, problems: Problems, num_layers: int) -> None:
        self._problems = problems
        self._num_layers = num_layers
        self._least: dict[Hashable, int] = {}  # elements of the smallest microbatch that was cut

    def is_needed(
        self, plan_key: PlanKey, before: InUse | None, can_cut: Callable[[], bool]
    ) -> bool:
        """``plan_key`` is of the uncut call, ``before`` its plan in use, if it has one."""
        kind = plan_key.run_type, plan_key.trains, plan_key.num_microbatches
        measured = self._problems.measured(plan_key)
        if measured.elements < self._least.get(kind, measured.elements + 1):
            is_as_before = (
                before is not None
                and before.shortages == measured.shortages
                and before.elements == measured.elements
            )
            if is_as_before or not can_cut() or self._fits(plan_key, measured):
                return False
            self._least[kind] = measured.elements
            return True
        return can_cut()

    def _fits(self, plan_key: PlanKey, measured: ShapeMeasurements) -> bool:
        """Says so as far as is known. The user's own plan fits until it has run out of memory."""
        if plan_key.chosen is not None or measured.shortages > _SHORTAGES_BELIEVED:
            return not measured.shortages
        is_blind = not measured.knows_graphs and not measured.shortages
        if is_blind and self._problems.tokens(plan_key) < TOKENS_GUESSED:
            return True  # because guesses are for so many at least
        self._problems.limit.ask()
        costs, workload = self._problems.of(plan_key, measured)
        allowed = workload.limit_bytes
        if not measured.shortages:
            # Without the share that is left for guesses, because a call that fails is made again.
            allowed = self._problems.most_allowed(plan_key, measured)
        costs = self._problems.guessed(plan_key, costs, measured)
        smallest = smallest_plan(plan_key.run_type, self._num_layers)
        on_host = replace(workload, limit_bytes=0.0)
        return plan_peak(smallest, plan_key.run_type, costs, on_host).bytes.total <= allowed
