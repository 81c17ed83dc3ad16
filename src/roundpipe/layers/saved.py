"""What the forward of a layer leaves for its recompute, so that running it again gives the same
result."""

from itertools import chain
from typing import Any, NamedTuple

from ..transfer.boundaries import Boundary, address_of
from ..transfer.spill import KeptInput, Spilled
from .module_state import LayerState

Key = tuple[int, int]  # layer, microbatch


class Graph(NamedTuple):
    """Of one microbatch in a stage: ``leaves`` of the boundary, where gradients will appear, and
    the ``output``."""

    leaves: list[Any]
    output: Any


class Kept:
    """What one call keeps, also for the backward round that a later ``backward()`` makes.

    Written by the workers of the forward, each its own keys, and taken by those of the backward.
    ``inputs``: of layers at which a backward stage run starts; ``states``: what layers saw of their
    buffers and attributes; ``data``: what they gave to ``save_for_recompute``; ``graphs``: of
    stages that are not recomputed, by the first layer. ``is_dropped``: nobody will come for them.
    """

    def __init__(self) -> None:
        self.inputs: dict[Key, KeptInput] = {}
        self.states: dict[Key, LayerState] = {}
        self.data: dict[Key, Boundary] = {}
        self.graphs: dict[Key, Graph] = {}
        self.is_dropped = False

    def __repr__(self) -> str:
        return (
            f"<Kept: {len(self.inputs)} inputs, {len(self.states)} states, "
            f"{len(self.data)} layers' data, {len(self.graphs)} graphs>"
        )

    def memory(self) -> set[int]:
        """Addresses of what a forward that is over has left on devices."""
        inputs = (kept.rest if isinstance(kept, Spilled) else kept for kept in self.inputs.values())
        boundaries = chain(inputs, self.data.values())
        return {address_of(leaf) for boundary in boundaries for leaf in boundary.leaves} - {0}

    def forget(self, layers: range, microbatch: int) -> None:
        """The layers have been through their backward."""
        for layer in layers:
            self.states.pop((layer, microbatch), None)
            self.data.pop((layer, microbatch), None)

    def clear(self) -> None:
        self.inputs.clear()
        self.states.clear()
        self.data.clear()
        self.graphs.clear()
        self.is_dropped = True
