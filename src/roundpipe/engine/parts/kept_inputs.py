"""Room on the devices for what all parts of a model keep at once: inputs, each from its part's
forward to its backward.

Each part's plan counts on the devices as if it were alone, which it is while it runs but for these.
"""

from ...autoplan.planner import Needs


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
