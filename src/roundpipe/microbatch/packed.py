"""The outputs of a call as its microbatches gave them: for another engine, or for code that wants
them one by one."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..device import Event


class RoundPipePackedData(list[Any]):
    """One value per microbatch, each on the device that made it (or on ``output_device`` if that
    was set).

    What ``forward`` returns with ``merge_output=False``. Another engine takes it as an argument,
    keyword argument or label, also inside containers: its microbatches are then those of this one,
    and what lies on the device that needs it is not copied. Part of the autograd graph like any
    output.

    Args:
        values: one per microbatch, of any type; its tensors are (rows of the microbatch, ...).
        rows: how many rows of the batch are in each; other tensors given beside this one are cut
            likewise.
        ready: what to wait for before values are complete.

    Example:
        >>> unmerged = RoundPipeRunConfig(merge_output=False)
        >>> hidden = first(x, roundpipe_run_config=unmerged)
        >>> loss = second.forward_backward((hidden,), label=y, loss_fn=loss_fn)
    """

    def __init__(
        self, values: Iterable[Any], rows: Sequence[int], ready: Sequence[Event] = ()
    ) -> None:
        super().__init__(values)
        self.rows = tuple(rows)
        self._ready = tuple(ready)
        assert len(self.rows) == len(self), f"{len(self)} values of {len(self.rows)} microbatches"

    def __repr__(self) -> str:
        return f"<RoundPipePackedData: {len(self)} microbatches of {list(self.rows)} rows>"

    def synchronize(self) -> "RoundPipePackedData":
        """Blocks until every value is complete, and returns the same object."""
        for event in self._ready:
            event.wait()
        return self
