"""A copy on an adversarial device: it happens late, and finds out what was wrong. See [Note: the
adversary] in `adversarial.py`."""

from typing import TYPE_CHECKING

import torch

from .ordering import Memory, bits, is_held_elsewhere, ledger, overlap, poison, span

if TYPE_CHECKING:
    from .lanes import AdversarialLane


class Copy:
    """A copy that has not happened yet."""

    def __init__(
        self,
        lanes: "list[AdversarialLane]",
        target: torch.Tensor,
        source: torch.Tensor,
        fault: str | None,
    ) -> None:
        self._lanes = lanes
        self.target = target.detach()
        # Another tensor object, so that it can be told whether others still hold it.
        self._source = source.detach()
        self._spans = span(target), span(source)
        self._fault = fault
        self._begun: torch.Tensor | None = None

    def follows(self, earlier: "Copy") -> bool:
        """Whether it cannot begin before another copy has ended."""
        (target, source), theirs = self._spans, earlier._spans
        return overlap(theirs[0], source) or any(overlap(one, target) for one in theirs)

    def begin(self) -> None:
        """From here on the copy may be under way: the source is being read, the target is in no
        defined state."""
        self._begun = bits(self._source)
        poison(self.target)

    def finish(self) -> None:
        fault = self._fault or self._fault_meanwhile()
        if fault is None:
            with torch.no_grad():
                self.target.copy_(self._source)
        else:
            self._lanes[0].report(
                f"copying {tuple(self._source.shape)} {self._source.dtype}: {fault}"
            )
            poison(self.target)

    def _fault_meanwhile(self) -> str | None:
        if self._begun is not None and not torch.equal(bits(self._source), self._begun):
            return "its source was written while the copy was in flight"
        for name, tensor in (("source", self._source), ("target", self.target)):
            if not is_held_elsewhere(tensor) and not self._outlives(name, ledger.of(tensor)):
                return (
                    f"its {name} was freed while the copy was in flight, and had not been lent to "
                    "its lane"
                )
        return None

    def _outlives(self, name: str, memory: Memory) -> bool:
        """Whether memory that nobody holds any more may not be used again before this copy has
        ended."""
        if memory.home is None:
            # The host's: what a page-locked tensor is read for keeps torch from reusing it.
            return name == "source"
        return any(lane.number in {memory.made_by, *memory.borrowed_by} for lane in self._lanes)
