"""Layers on their way up to one device, in the schedule's order, each as soon as the optimizer has written back it.

The worker does not stand still for a layer that it does not need yet: an update writes back shallow layers first, and a
forward that follows it closely hides behind it.
"""

from collections import deque
from collections.abc import Callable

from .call import Call
from .loader import StageLoader
from .stage import Stage


class Uploads:
    """Used by the device's worker only.

    Args:
        is_written_back: of a layer and the version of the weights that a call runs with; raises what keeps that from ever
            being so.
    """

    def __init__(self, loader: StageLoader, is_written_back: Callable[[int, int], bool]) -> None:
        self._loader = loader
        self._is_written_back = is_written_back
        self._waiting: deque[tuple[Stage, int]] = deque()

    def begin(self, call: Call, stage: Stage) -> None:
        """Queues what is written back of the stage's weights; the rest follows when somebody needs some of it."""
        self._waiting.extend((stage, layer) for layer in stage.stage_run.layers)
        self._go_on(call)

    def need(self, call: Call, stage: Stage, layer: int) -> None:
        """Blocks until the layer's copies are queued. Raises Cancelled if the call fails meanwhile."""
        if not self._waiting:
            return
        while layer not in stage.uploaded:
            call.mailbox.wait_until(lambda: self._is_next_written_back(call))
            self._upload_next()
        self._go_on(call)

    def give_up(self) -> None:
        self._waiting.clear()

    def _go_on(self, call: Call) -> None:
        while self._waiting and call.mailbox.is_so(lambda: self._is_next_written_back(call)):
            self._upload_next()

    def _is_next_written_back(self, call: Call) -> bool:
        return self._is_written_back(self._waiting[0][1], call.settings.weights.version)

    def _upload_next(self) -> None:
        self._loader.upload(*self._waiting[0])
        self._waiting.popleft()
