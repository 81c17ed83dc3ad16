"""Costs of a model's layers as they turn out while running. Shared between threads."""

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Literal, NamedTuple

from ..device import MemoryInUse
from ..plan.costs import LayerCosts
from .rates import NOTABLE, Changes, Rates, smoothed

# What a stage run spends its time on: a layer's forward (with or without a graph), its forward once
# more, its backward.
Computation = Literal["forward", "recompute", "backward"]
COMPUTATIONS: tuple[Computation, ...] = ("forward", "recompute", "backward")


class Shortages(NamedTuple):
    """Counts how often a device's memory did not suffice; see `ShapeMeasurements`."""

    of_plans: int
    beside_recordings: int


class ShapeMeasurements:
    """What was measured on microbatches of the same shapes; what was not is taken from a layer like
    it, else it is ``estimate``, scaled to what was.

    Layers with as many weight bytes are taken to be alike. Workers record and the caller's thread
    reads: every method may be called from any thread, and none waits for long.

    ``elements``: of the largest microbatch, which bytes are measured of or scaled to.
    ``caller_bytes``: the most that all inputs of a call, or their gradients, took on devices;
    ``output_bytes``: that all its outputs took. ``shortages``: how often a device's memory did not
    suffice for a plan alone; ``shortages_beside_recordings``: how often not beside recordings of
    layers, which fill what plans leave and were let go of then.
    """

    def __init__(self, estimate: LayerCosts, rates: Rates) -> None:
        self._lock = threading.Lock()  # because a reader must not see half of an update
        self._estimate = estimate
        self._rates = rates
        self._ms: dict[Computation, dict[int, float]] = {
            computation: {} for computation in COMPUTATIONS
        }
        self._saved: dict[int, int] = {}
        self._passing: dict[int, int] = {}
        self._inputs: dict[int, int] = {}
        self._changes = Changes()
        self.elements = 0
        self.caller_bytes = 0
        self.output_bytes = 0
        self.shortages = 0
        self.shortages_beside_recordings = 0
        self._between: tuple[bool, int] | None = None

    def __repr__(self) -> str:
        times = sum(map(len, self._ms.values()))
        return (
            f"<ShapeMeasurements: {times} times, {len(self._saved)} graphs, version {self.version}>"
        )

    @property
    def version(self) -> int:
        """Grows when something changed that could change a plan."""
        return self._changes.count + self._rates.version

    @property
    def rates(self) -> Rates:
        return self._rates

    def record_time(self, computation: Computation, layer: int, ms: float) -> None:
        """One microbatch took so long in ``layer``. Smoothed; the first one stands as it is."""
        with self._lock:
            self._ms[computation][layer] = now = smoothed(self._ms[computation].get(layer), ms)
            self._changes.note((computation, layer), now)

    def record_saved_bytes(self, layer: int, num_bytes: int, largest_bytes: int = 0) -> None:
        """What autograd keeps of one microbatch in ``layer``; one past the last layer stands for
        the loss."""
        with self._lock:
            self._passing[layer] = largest_bytes
        self._record("saved", self._saved, layer, num_bytes)

    def knows_graph(self, layer: int) -> bool:
        """Whether ``record_saved_bytes`` was called for ``layer``."""
        return layer in self._saved

    def grow_to(self, elements: int) -> None:
        """A microbatch of so many elements comes. If that is notably more than all before it had,
        what those brought and kept becomes as much more, because shapes that are called the same
        are so only within a fifth."""
        with self._lock:
            before, grown = self.elements, elements > self.elements * (1 + NOTABLE)
            self.elements = elements if grown else before
            if not grown or not before:
                return
            for kind, known in (
                ("saved", self._saved),
                ("passing", self._passing),
                ("input", self._inputs),
            ):
                for layer, num_bytes in known.items():
                    known[layer] = num_bytes * elements // before
                    self._changes.note((kind, layer), known[layer])

    def record_shortage(self, *, beside_recordings: bool = False) -> None:
        """A device's memory did not suffice."""
        with self._lock:
            if beside_recordings:
                self.shortages_beside_recordings += 1
            else:
                self.shortages += 1

    def record_caller_bytes(self, num_bytes: int) -> None:
        """Inputs of a call, all microbatches together, that somebody else holds on a device while
        it runs."""
        with self._lock:
            self.caller_bytes = max(self.caller_bytes, num_bytes)
            if self.caller_bytes:
                self._changes.note("caller", self.caller_bytes)

    def record_output_bytes(self, num_bytes: int) -> None:
        """All outputs of a call together."""
        with self._lock:
            self.output_bytes = max(self.output_bytes, num_bytes)
            self._changes.note("output", self.output_bytes)

    @property
    def between_bytes(self) -> int:
        """The bytes that callers take of a device at most between a forward and its backward,
        beside the outputs: for a loss of their own. As far as that was seen; 0 before."""
        return 0 if self._between is None else self._between[1]

    def record_between(self, after: MemoryInUse, before: MemoryInUse) -> None:
        """A device's memory ``after`` a forward and ``before`` its backward.

        A peak that has grown says exactly what was needed, and the most of those counts. One that
        has not only says that it was not more, and the least of those counts until one grows.
        """
        is_exact, num_bytes = before.most > after.most, before.most - after.now
        with self._lock:
            was_exact, known = self._between or (False, num_bytes)
            if is_exact:
                known = max(known, num_bytes) if was_exact else num_bytes
            elif not was_exact:
                known = min(known, num_bytes)
            self._between = (is_exact or was_exact, known)

    def record_input_bytes(self, layer: int, num_bytes: int) -> None:
        """What one microbatch brings into ``layer``."""
        self._record("input", self._inputs, layer, num_bytes)

    def costs(self) -> LayerCosts:
        """Everything known by now."""
        estimate, past_last = self._estimate, self._estimate.num_layers
        with self._lock:
            forward = self._times("forward")
            saved, passing = self._alike(self._saved), self._alike(self._passing)
            return replace(
                estimate,
                forward=forward,
                recompute=self._times("recompute") if self._ms["recompute"] else forward,
                backward=self._times("backward"),
                up_ms_per_byte=self._rates.ms_per_byte("up", estimate.up_ms_per_byte),
                down_ms_per_byte=self._rates.ms_per_byte("down", estimate.down_ms_per_byte),
                saved_bytes=(*saved[:-1], saved[-1] + self._saved.get(past_last, 0)),
                passing_bytes=(*passing[:-1], max(passing[-1], self._passing.get(past_last, 0))),
                input_bytes=self._alike(self._inputs),
            )

    @property
    def knows_graphs(self) -> bool:
        """Whether every layer's saved bytes were measured, or those of one like it."""
        with self._lock:
            sizes = self._estimate.weight_bytes
            return not {*sizes} - {sizes[layer] for layer in self._saved if layer < len(sizes)}

    def _times(self, computation: Computation) -> tuple[float, ...]:
        known, estimate, sizes = (
            self._ms[computation],
            getattr(self._estimate, computation),
            self._estimate.weight_bytes,
        )
        of_size: dict[int, list[float]] = {}
        for layer, ms in known.items():
            of_size.setdefault(sizes[layer], []).append(ms)
        means = {size: sum(times) / len(times) for size, times in of_size.items()}
        scale = self._scale()
        # What the estimate says takes no time is never run.
        return tuple(
            ms and known.get(layer, means.get(size, ms * scale))
            for layer, (ms, size) in enumerate(zip(estimate, sizes, strict=True))
        )

    def _scale(self) -> float:
        """How much slower the measured computations are than the estimate said."""
        guessed = measured = 0.0
        for computation, known in self._ms.items():
            guessed += sum(getattr(self._estimate, computation)[layer] for layer in known)
            measured += sum(known.values())
        return measured / guessed if guessed else 1.0

    def _alike(self, known: dict[int, int]) -> tuple[int, ...]:
        of_size: dict[int, int] = {}
        for layer, size in enumerate(self._estimate.weight_bytes):
            of_size[size] = max(of_size.get(size, 0), known.get(layer, 0))
        return tuple(
            known.get(layer, of_size.get(size, 0))
            for layer, size in enumerate(self._estimate.weight_bytes)
        )

    def _record(self, kind: str, known: dict[int, int], layer: int, num_bytes: int) -> None:
        with self._lock:
            known[layer] = num_bytes
            self._changes.note((kind, layer), num_bytes)


class Measurements:
    """An engine's measurements by the shapes of its microbatches. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # because two threads asking first must get the same object
        self._by_shapes: dict[Hashable, ShapeMeasurements] = {}
        self.rates = Rates()

    @property
    def shortages(self) -> Shortages:
        """On microbatches of any shapes."""
        with self._lock:
            known = list(self._by_shapes.values())
        return Shortages(
            of_plans=sum(each.shortages for each in known),
            beside_recordings=sum(each.shortages_beside_recordings for each in known),
        )

    def of(self, shapes: Hashable, estimate: LayerCosts) -> ShapeMeasurements:
        """The measurements of ``shapes``; ``estimate`` is used if they are the first."""
        with self._lock:
            known = self._by_shapes.get(shapes)
            if known is None:
                known = self._by_shapes[shapes] = ShapeMeasurements(estimate, self.rates)
            return known
