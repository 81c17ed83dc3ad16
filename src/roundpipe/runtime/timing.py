"""Times layers and copies in the few calls that are timed.

Nothing ever waits for a device: a stopwatch keeps pairs of marks, and reads those that were reached
when a later stage run ends. A layer is timed from mark to mark around it, once per stage run; its
backward from the moment at which the gradient of its output is there to that of its input's.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ..autoplan.measurements import Computation, ShapeMeasurements
from ..autoplan.rates import Way
from ..device import Device, Lane, Mark
from ..microbatch.sizes import first_of_graph
from ..plan.actions import StageRun


class _Sample(NamedTuple):
    record: Callable[[float], None]
    begin: Mark
    end: Mark


class Stopwatch:
    """What was marked on one device and not read yet. Filled and read by its worker, and by
    backwards it waits for."""

    def __init__(self) -> None:
        self._unread: deque[_Sample] = deque()

    def __repr__(self) -> str:
        return f"<Stopwatch: {len(self._unread)} unread>"

    def add(self, record: Callable[[float], None], begin: Mark, end: Mark) -> None:
        """``record`` gets the milliseconds between the marks."""
        self._unread.append(_Sample(record, begin, end))

    def read(self) -> None:
        """Hands on what the device has come past, in order."""
        while self._unread:
            record, begin, end = self._unread[0]
            seconds = end.seconds_since(begin)
            if seconds is None:
                return
            self._unread.popleft()
            record(1e3 * seconds)


class Timer:
    """Of a stage run that is not timed."""

    def layer(
        self, computation: Computation, layer: int, microbatch: int
    ) -> AbstractContextManager[None]:
        """The block runs a layer."""
        return nullcontext()

    def made(self, layer: int, microbatch: int, output: Any) -> None:
        """A layer's output, in the graph that ``backward`` will run through."""

    def backward(self, layers: range, microbatch: int) -> AbstractContextManager[None]:
        """The block runs the backward of ``layers``, and first the loss if there is one."""
        return nullcontext()

    def copies(self, way: Way, lane: Lane, num_bytes: int) -> AbstractContextManager[None]:
        """The block queues copies, so many bytes in all."""
        return nullcontext()


class StageRunTimer(Timer):
    """Of a timed stage run.

    Args:
        microbatch: the one whose layers are timed.
    """

    def __init__(
        self, watch: Stopwatch, measured: ShapeMeasurements, compute: Lane, microbatch: int
    ) -> None:
        self._watch = watch
        self._measured = measured
        self._compute = compute
        self._microbatch = microbatch
        self._arrived: dict[int, Mark] = {}  # by layer, when the gradient of its output was there

    @contextmanager
    def layer(self, computation: Computation, layer: int, microbatch: int) -> Iterator[None]:
        if microbatch != self._microbatch:
            yield
            return
        begin = self._compute.mark()
        yield
        self._add(computation, layer, begin, self._compute.mark())

    def made(self, layer: int, microbatch: int, output: Any) -> None:
        leaf = first_of_graph(output) if microbatch == self._microbatch else None
        if leaf is not None:
            leaf.register_hook(partial(self._note_arrival, layer))

    def _note_arrival(self, layer: int, gradient: torch.Tensor) -> None:
        self._arrived[layer] = self._compute.mark()

    @contextmanager
    def backward(self, layers: range, microbatch: int) -> Iterator[None]:
        if microbatch != self._microbatch or not layers:
            yield
            return
        self._arrived.clear()
        begin = self._compute.mark()
        yield
        end = self._compute.mark()
        for layer in reversed(layers):
            below = self._arrived.get(layer - 1) if layer > layers.start else None
            self._add("backward", layer, begin, below or end)
            if below is None:
                return
            begin = below

    @contextmanager
    def copies(self, way: Way, lane: Lane, num_bytes: int) -> Iterator[None]:
        begin = lane.mark()
        yield
        self._watch.add(
            partial(self._measured.rates.record_copy, way, num_bytes), begin, lane.mark()
        )

    def _add(self, computation: Computation, layer: int, begin: Mark, end: Mark) -> None:
        self._watch.add(partial(self._measured.record_time, computation, layer), begin, end)


_UNTIMED = Timer()


def timer_of(
    stage_run: StageRun, device: Device, watch: Stopwatch, measured: ShapeMeasurements | None
) -> Timer:
    """``measured``: None if the stage run is not timed.

    Neither the first microbatch is timed, which opens the layers, nor the last, which offloads
    their gradients, if there is another one.
    """
    if measured is None:
        return _UNTIMED
    num_microbatches = len(stage_run.microbatches)
    return StageRunTimer(
        watch, measured, device.compute, stage_run.microbatches[1 if num_microbatches > 2 else 0]
    )
