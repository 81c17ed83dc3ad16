"""Stages that wait on a device from a forward to its backward.

[Note: kept graphs] A stage run of a forward may keep the graphs of its microbatches for the
backward, which is a call of its own and goes to the same device. The stage is *parked* until then:
its slots, residents and replicas stay its own, because the graphs read them. It is dropped at the
beginning of a later call if its forward failed or nobody holds what the forward has made.
"""

import weakref
from collections.abc import Callable

from ..layers.saved import Kept
from ..plan.actions import StageRun
from .stage import Stage


class ParkedStages:
    """Of one device. Used by its worker."""

    def __init__(self) -> None:
        self._stages: list[tuple[weakref.ref[Kept], Stage]] = []

    def __repr__(self) -> str:
        return f"<ParkedStages: {len(self._stages)}>"

    def put(self, kept: Kept, stage: Stage) -> None:
        """Its forward is over, and left ``kept``."""
        self._stages.append((weakref.ref(kept), stage))

    def take(self, kept: Kept, run: StageRun) -> Stage:
        """The stage whose graphs ``run`` goes backward through."""
        for place, (holder, stage) in enumerate(self._stages):
            of = stage.stage_run
            is_same = (of.layers, of.microbatches) == (run.layers, run.microbatches)
            if holder() is kept and is_same:
                del self._stages[place]
                stage.stage_run = run
                return stage
        raise AssertionError(f"no stage waits for {run}")

    def drop(self, let_go: Callable[[Stage], None]) -> None:
        """Lets go of those that no backward will come for."""
        waiting, self._stages = self._stages, []
        for holder, stage in waiting:
            kept = holder()
            if kept is None or kept.is_dropped:
                let_go(stage)
            else:
                self._stages.append((holder, stage))
