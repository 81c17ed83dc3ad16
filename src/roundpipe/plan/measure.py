"""Costs as they turn out while running. The one file of plan/ that looks at tensors and is shared between threads."""

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

import torch

from .actions import Pass
from .costs import LayerCosts

# Share of a new measurement in the smoothed one, and how many of a visit's first ones are not to be trusted.
_NEW, _EARLY = 0.3, 3
# A smaller relative change is no reason to plan again.
_NOTABLE = 0.05
# Guesses that only have to be right relative to each other: tokens in a microbatch, matmul rate, copy rate, and what
# any layer costs. 16-bit weights then take as long to go up over PCIe gen4 as to run forward.
_TOKENS, _FLOPS, _BYTES_PER_MS, _LEAST_MS = 8192, 2e14, 25e6, 0.01

# What a pass runs of a layer.
_PARTS = {
    Pass.FORWARD: ("forward",),
    Pass.FUSED: ("forward", "backward"),
    Pass.BACKWARD: ("recompute", "backward"),
}
_ALL_PARTS = ("forward", "recompute", "backward")


class LayerSize(NamedTuple):
    """What is known of a layer before it runs. ``matmul_elements``: its weights that every token is multiplied by."""

    weight_bytes: int
    gradient_bytes: int
    matmul_elements: int
    trains: bool


def prior_costs(layers: Sequence[LayerSize], first_trained: int) -> LayerCosts:
    """Costs from sizes: 2 operations per weight and token forward, as many again for each gradient of the backward."""
    forward = [_LEAST_MS + 2e3 * _TOKENS * layer.matmul_elements / _FLOPS for layer in layers]
    gradients = [(index >= first_trained) * (1 + layer.trains) for index, layer in enumerate(layers)]
    return LayerCosts(
        forward=tuple(forward),
        backward=tuple(ms * count for ms, count in zip(forward, gradients, strict=True)),
        weight_bytes=tuple(layer.weight_bytes for layer in layers),
        gradient_bytes=tuple(layer.gradient_bytes for layer in layers),
        copy_ms_per_byte=1 / _BYTES_PER_MS,
    )


def with_guessed_graphs(costs: LayerCosts, layers: Sequence[LayerSize]) -> LayerCosts:
    """Activations of each layer as if it were a transformer block with as many weights; for a first call to be careful.

    34 bytes per token and unit of width, as counted by Korthikanti et al. 2022 (without attention scores, which fused
    kernels do not keep); 12 weights per unit of width squared.
    """
    token_widths = [_TOKENS * sqrt(layer.matmul_elements / 12) for layer in layers]
    return replace(
        costs,
        saved_bytes=tuple(int(34 * width) for width in token_widths),
        passing_bytes=tuple(int(8 * width) for width in token_widths),
        input_bytes=tuple(int(2 * width) for width in token_widths),
    )


class GraphBytes:
    """Counts what autograd keeps of a layer. ``pack`` and ``count`` are made for ``saved_tensors_hooks``.

    Storages count once and whole; the layer's own parameters do not. Holds the storages, because freed memory that is
    used again would look like a storage already counted.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    @property
    def largest_bytes(self) -> int:
        """The largest single one: the gradient of something that large passes through the layer's backward."""
        return max((storage.nbytes() for storage in self._kept.values()), default=0)

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._kept[storage.data_ptr()] = storage

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts, and lets autograd keep the tensor."""
        self.count(tensor)
        return tensor


class ShapeMeasurements:
    """What was measured on microbatches of the same shapes; what was not is ``prior``, scaled to what was.

    Workers record and the caller's thread reads: every method may be called from any thread, and none waits for long.
    """

    def __init__(self, prior: LayerCosts) -> None:
        self._lock = threading.Lock()  # because a reader must not see half of an update
        self._prior = {
            (part, layer): ms for part in _ALL_PARTS for layer, ms in enumerate(getattr(prior, part)) if ms > 0
        }
        self._costs = prior
        self._ms: dict[tuple[str, int], float] = {}
        self._times_seen: Counter[tuple[Pass, range]] = Counter()
        self._saved: dict[int, int] = {}
        self._passing: dict[int, int] = {}
        self._inputs: dict[int, int] = {}
        self._version = 0

    def __repr__(self) -> str:
        return f"<ShapeMeasurements: {len(self._ms)} times, {len(self._saved)} graphs, version {self._version}>"

    @property
    def version(self) -> int:
        """Grows when something changed that could change a plan."""
        return self._version

    def record_time(self, pass_: Pass, layers: range, ms: float) -> None:
        """One microbatch of a visit took ``ms``; the parts of its layers share the surprise in proportion."""
        with self._lock:
            expected = {
                (part, layer): self._estimate(part, layer)
                for layer in layers
                for part in _PARTS[pass_]
                if (part, layer) in self._prior
            }
            total = sum(expected.values())
            if not total:
                return
            surprise = ms / total - 1
            self._times_seen[pass_, layers] += 1
            # First times contain compilation and allocation, so for a while a faster one replaces what was known.
            is_early = self._times_seen[pass_, layers] <= _EARLY
            weight = 1.0 if is_early and surprise < 0 else _NEW
            is_new = any(key not in self._ms for key in expected)
            for key, value in expected.items():
                self._ms[key] = value * (1 + (weight if key in self._ms else 1.0) * surprise)
            if is_new or abs(surprise) * weight > _NOTABLE:
                self._version += 1

    def record_saved_bytes(self, layer: int, num_bytes: int, largest_bytes: int = 0) -> None:
        """What autograd keeps of one microbatch in ``layer``; one past the last layer stands for the loss."""
        with self._lock:
            self._passing[layer] = largest_bytes
        self._record(self._saved, layer, num_bytes)

    def knows_graph(self, layer: int) -> bool:
        """Whether ``record_saved_bytes`` was called for ``layer``."""
        return layer in self._saved

    def record_input_bytes(self, layer: int, num_bytes: int) -> None:
        """What one microbatch brings into ``layer``."""
        self._record(self._inputs, layer, num_bytes)

    def costs(self) -> LayerCosts:
        """Everything known by now. Layers with as many weight bytes are taken to be alike."""
        layers = range(self._costs.num_layers)
        with self._lock:
            times: dict[str, Any] = {part: tuple(self._estimate(part, i) for i in layers) for part in _ALL_PARTS}
            past_last = self._costs.num_layers
            saved, passing = self._alike(self._saved), self._alike(self._passing)
            return replace(
                self._costs,
                **times,
                saved_bytes=(*saved[:-1], saved[-1] + self._saved.get(past_last, 0)),
                passing_bytes=(*passing[:-1], max(passing[-1], self._passing.get(past_last, 0))),
                input_bytes=self._alike(self._inputs),
            )

    @property
    def knows_graphs(self) -> bool:
        """Whether every layer's saved bytes were measured, or those of one like it."""
        with self._lock:
            sizes = self._costs.weight_bytes
            return not {*sizes} - {sizes[layer] for layer in self._saved if layer < len(sizes)}

    def _estimate(self, part: str, layer: int) -> float:
        measured = self._ms.get((part, layer))
        if measured is None and part == "recompute":
            measured = self._ms.get(("forward", layer))
        if measured is not None:
            return measured
        guessed: float = self._prior.get((part, layer), 0.0)
        return guessed * self._scale()

    def _scale(self) -> float:
        """How much slower the measured parts are than the prior said."""
        guessed = sum(self._prior[key] for key in self._ms)
        measured: float = sum(self._ms.values())
        return measured / guessed if guessed else 1.0

    def _alike(self, known: dict[int, int]) -> tuple[int, ...]:
        of_size: dict[int, int] = {}
        for layer, size in enumerate(self._costs.weight_bytes):
            of_size[size] = max(of_size.get(size, 0), known.get(layer, 0))
        return tuple(known.get(layer, of_size.get(size, 0)) for layer, size in enumerate(self._costs.weight_bytes))

    def _record(self, known: dict[int, int], layer: int, num_bytes: int) -> None:
        with self._lock:
            before = known.get(layer)
            known[layer] = num_bytes
            if before is None or abs(num_bytes - before) > _NOTABLE * before:
                self._version += 1


class Measurements:
    """An engine's measurements by the shapes of its microbatches. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # because two threads asking first must get the same object
        self._by_shapes: dict[Hashable, ShapeMeasurements] = {}

    def of(self, shapes: Hashable, prior: LayerCosts) -> ShapeMeasurements:
        """The measurements of ``shapes``; ``prior`` is used if they are the first."""
        with self._lock:
            return self._by_shapes.setdefault(shapes, ShapeMeasurements(prior))
