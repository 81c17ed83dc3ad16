"""Costs as they turn out while running. Looks at tensors, and is
shared between threads."""

import threading
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from math import sqrt
from typing import Literal, NamedTuple

import torch

from ..device import MemoryInUse
from ..plan.costs import LayerCosts

# What a stage run spends its time on: a layer's forward (with or without a graph), its forward once
# more, its backward.
Computation = Literal["forward", "recompute", "backward"]
Way = Literal["up", "down"]
COMPUTATIONS: tuple[Computation, ...] = ("forward", "recompute", "backward")

# Share of a new measurement in the smoothed one. No single one counts for more than so many times
# what was known: a hiccup of the machine is no property of a layer, and what is one shows again.
_NEW, _MOST = 0.3, 2.0
# A smaller relative change is no reason to plan again.
_NOTABLE = 0.05
# Guesses that only have to be right relative to each other: tokens in a microbatch, matmul rate,
# copy rate, what any layer costs, and the host's memory bandwidth. 16-bit weights then take as long
# to go up over PCIe gen4 as to run.
_TOKENS, _FLOPS, _BYTES_PER_MS, _LEAST_MS, _HOST_BYTES_PER_MS = 8192, 2e14, 25e6, 0.01, 50e6
# An update reads a 16-bit gradient and writes 16-bit weights, and reads and writes fp32 masters and
# two moments.
_UPDATE_BYTES = 28
# Updates after which their time says something, and of which the shortest counts.
_RECENT = 8


class LayerSize(NamedTuple):
    """What is known of a layer before it runs. ``matmul_elements``: its weights that every token is
    multiplied by."""

    weight_bytes: int
    upload_bytes: int
    gradient_bytes: int
    offloaded_bytes: int
    matmul_elements: int
    trained_elements: int


def estimate_costs(layers: Sequence[LayerSize], first_trained: int) -> LayerCosts:
    """Costs from sizes: 2 operations per weight and token forward, as many again for each gradient
    of the backward."""
    forward = [_LEAST_MS + 2e3 * _TOKENS * layer.matmul_elements / _FLOPS for layer in layers]
    gradients = [
        (index >= first_trained) * (1 + (layer.trained_elements > 0))
        for index, layer in enumerate(layers)
    ]
    return LayerCosts(
        forward=tuple(forward),
        backward=tuple(ms * count for ms, count in zip(forward, gradients, strict=True)),
        weight_bytes=tuple(layer.weight_bytes for layer in layers),
        upload_bytes=tuple(layer.upload_bytes for layer in layers),
        gradient_bytes=tuple(layer.gradient_bytes for layer in layers),
        offloaded_bytes=tuple(layer.offloaded_bytes for layer in layers),
        up_ms_per_byte=1 / _BYTES_PER_MS,
        down_ms_per_byte=1 / _BYTES_PER_MS,
    )


def estimate_update_ms(layers: Sequence[LayerSize]) -> float:
    """An update, from its bytes."""
    return sum(layer.trained_elements for layer in layers) * _UPDATE_BYTES / _HOST_BYTES_PER_MS


def with_guessed_graphs(
    costs: LayerCosts, layers: Sequence[LayerSize], tokens: int = 0
) -> LayerCosts:
    """Activations of each layer of which nothing was measured, as if it were a transformer block
    with as many weights; for a first call to be careful.

    34 bytes per token and unit of width, as counted by Korthikanti et al. 2022 (without attention
    scores, which fused kernels do not keep); 12 weights per unit of width squared. As much more as
    that was too little for those measured.

    Args:
        tokens: of the largest microbatch; a guess that is too small is worse than one that is too
            large.
    """
    token_widths = [max(tokens, _TOKENS) * sqrt(layer.matmul_elements / 12) for layer in layers]

    def filled(measured: Sequence[int], bytes_per_width: int) -> tuple[int, ...]:
        guesses = [int(bytes_per_width * width) for width in token_widths]
        both = [
            (num_bytes, guess)
            for num_bytes, guess in zip(measured, guesses, strict=True)
            if num_bytes and guess
        ]
        scale = max((num_bytes / guess for num_bytes, guess in both), default=1.0)
        return tuple(
            num_bytes or int(scale * guess)
            for num_bytes, guess in zip(measured, guesses, strict=True)
        )

    return replace(
        costs,
        saved_bytes=filled(costs.saved_bytes, 34),
        passing_bytes=filled(costs.passing_bytes, 8),
        input_bytes=filled(costs.input_bytes, 2),
    )


class GraphBytes:
    """Counts what autograd keeps of a layer. ``pack`` and ``count`` are made for
    ``saved_tensors_hooks``.

    Storages count once and whole; the layer's own parameters do not. Holds the storages, because
    freed memory that is used again would look like a storage already counted.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._own = {_place(parameter.untyped_storage()) for parameter in parameters}
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    @property
    def largest_bytes(self) -> int:
        """The largest single one: the gradient of something that large passes through the layer's
        backward."""
        return max((storage.nbytes() for storage in self._kept.values()), default=0)

    def count(self, tensor: torch.Tensor) -> None:
        if (
            tensor.layout is not torch.strided
        ):  # sparse ones have no storage; what they hold is not counted
            return
        storage = tensor.untyped_storage()
        if _place(storage) not in self._own:
            self._kept[_place(storage)] = storage

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts, and lets autograd keep the tensor. Without its node, which may be the one that
        keeps it: where no backward comes by, after a failure for example, that circle would never
        go."""
        self.count(tensor)
        return tensor.detach()


def _place(storage: torch.UntypedStorage) -> int:
    """Its address, or where there is no memory, on the meta device, that of torch's note of it."""
    return storage.data_ptr() or storage._cdata


class _Changes:
    """Counts changes large enough to plan again, each measured from where the last one that counted
    ended."""

    def __init__(self) -> None:
        self.count = 0
        self._announced: dict[Hashable, float] = {}

    def note(self, key: Hashable, now: float) -> None:
        before = self._announced.get(key)
        if before is None or abs(now - before) > _NOTABLE * before:
            self._announced[key] = now
            self.count += 1


class Rates:
    """What the machine itself takes, whatever the shapes: copies each way, and an update. Any
    thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # because sums of bytes and of times belong together
        self._changes = _Changes()
        self._copies: dict[Way, tuple[float, float]] = {}
        self._updates_seen = 0
        self._update_ms = 0.0
        self._recent_updates_ms: deque[float] = deque(maxlen=_RECENT)

    @property
    def version(self) -> int:
        """Grows when something changed that could change a plan."""
        return self._changes.count

    def record_copy(self, way: Way, num_bytes: int, ms: float) -> None:
        """Bytes and times are smoothed apart, so that a large copy says more than a small one."""
        if not num_bytes or ms <= 0:
            return
        with self._lock:
            all_bytes, all_ms = self._copies.get(way, (0.0, 0.0))
            all_bytes, all_ms = (1 - _NEW) * all_bytes + num_bytes, (1 - _NEW) * all_ms + ms
            self._copies[way] = all_bytes, all_ms
            self._changes.note(way, all_ms / all_bytes)

    def ms_per_byte(self, way: Way, estimate: float) -> float:
        num_bytes, ms = self._copies.get(way, (0.0, 0.0))
        return ms / num_bytes if num_bytes else estimate

    def record_update(self, ms: float) -> None:
        """The second one stands for the first, in which optimizers allocate their moments."""
        with self._lock:
            self._update_ms = ms if self._updates_seen < 2 else _smoothed(self._update_ms, ms)
            self._updates_seen += 1
            self._recent_updates_ms.append(ms)
            self._changes.note("update", self._update_ms)

    @property
    def is_warm(self) -> bool:
        """True once there was an update after the first, in which optimizers allocate."""
        return self._updates_seen >= 2

    @property
    def knows_update(self) -> bool:
        """True once so many updates were seen that some were neither the first ones, which
        allocate, nor disturbed."""
        return self._updates_seen >= _RECENT

    @property
    def least_update_ms(self) -> float:
        """The shortest of the latest updates. What the machine does besides makes updates longer,
        never shorter."""
        with self._lock:
            return min(self._recent_updates_ms, default=0.0)

    def update_ms(self, estimate: float) -> float:
        return self._update_ms if self._updates_seen else estimate


class ShapeMeasurements:
    """What was measured on microbatches of the same shapes; what was not is taken from a layer like
    it, else it is ``estimate``, scaled to what was.

    Layers with as many weight bytes are taken to be alike. Workers record and the caller's thread
    reads: every method may be called from any thread, and none waits for long.

    ``elements``: of the largest microbatch, which bytes are measured of or scaled to.
    ``caller_bytes``: the most that all inputs of a call, or their gradients, took on devices;
    ``output_bytes``: that all its outputs took. ``shortages``: how often a device's memory did not
    suffice.
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
        self._changes = _Changes()
        self.elements = 0
        self.caller_bytes = 0
        self.output_bytes = 0
        self.shortages = 0
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
            self._ms[computation][layer] = now = _smoothed(self._ms[computation].get(layer), ms)
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
            before, grown = self.elements, elements > self.elements * (1 + _NOTABLE)
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

    def record_shortage(self) -> None:
        """A device's memory did not suffice."""
        with self._lock:
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
    def shortages(self) -> int:
        """On microbatches of any shapes."""
        with self._lock:
            return sum(known.shortages for known in self._by_shapes.values())

    def of(self, shapes: Hashable, estimate: LayerCosts) -> ShapeMeasurements:
        """The measurements of ``shapes``; ``estimate`` is used if they are the first."""
        with self._lock:
            known = self._by_shapes.get(shapes)
            if known is None:
                known = self._by_shapes[shapes] = ShapeMeasurements(estimate, self.rates)
            return known


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + _NEW * (min(now, _MOST * before) - before)
