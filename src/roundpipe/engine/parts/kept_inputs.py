"""Room on the devices for what all parts of a model keep at once: inputs, each from its part's
forward to its backward.

Each part's plan counts on the devices as if it were alone, which it is while it runs but for these.
"""

from collections.abc import Sequence

from ...autoplan.free_memory import FreeMemory
from ...autoplan.planner import Needs, Planned
from ...plan.actions import Passes
from ...plan.schedule import saved_layers


class KeptInputs:
    """Used by the caller's thread, for all parts of one model."""

    def __init__(self) -> None:
        self._needs: dict[str, Needs] = {}

    def suffices(self, part: str, needs: Needs) -> bool:
        """Whether ``part`` may keep what its plan wants to. Notes its ``needs`` for the others'
        sake.

        Whichever part runs must find room beside what all others keep, counted as if that were on
        one device.
        """
        self._needs[part] = needs
        everyone = self._needs.values()
        kept = sum(each.kept for each in everyone)
        return all(kept - each.kept + each.most <= each.allowed for each in everyone)


class SharedMemory:
    """Of devices that one part has while it runs. No layers stay and none have device states,
    because each part's planner believes that the devices' spare memory is its own."""

    def __init__(self, part: str, free: FreeMemory, kept: KeptInputs) -> None:
        self.slot_limit = free.slot_limit
        self._part = part
        self._kept = kept

    def settle(self, planned: Planned, later: Passes) -> Planned:
        """Other parts run between this one's forward and its backward: without room for all, kept
        inputs wait on the host."""
        if not later or self._kept.suffices(self._part, planned.needs):
            return planned
        return planned._replace(spilled=saved_layers(later))

    def resident_layers(self, planned: Planned, rounds: Sequence[Passes]) -> frozenset[int]:
        return frozenset()
