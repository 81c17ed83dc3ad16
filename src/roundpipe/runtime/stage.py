"""A stage on a device: its weights in slots and its layers' replicas, for the time of one stage
run."""

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..device import Lane
from ..layers.parameters import ReplicaParameters
from ..layers.replica import Replica
from ..layers.snapshot import LayerWatch
from ..memory.slots import Slot
from ..microbatch.sizes import tensor_leaves
from ..params.gradients import Accumulator, Offloader
from ..params.working import LayerParameters
from ..plan.actions import Pass, StageRun
from ..transfer.boundaries import Boundary, address_of, copied
from ..transfer.sender import Sent
from .call import Call, ModelThen
from .departure import Departure
from .timing import Timer


class UploadedLayer(NamedTuple):
    """A layer's weights in a slot, or in its device state if ``is_on_device``, usable after
    ``sent.arrive``."""

    layer: LayerParameters
    slot: Slot
    sent: Sent
    is_on_device: bool = False


class Stage:
    """One stage run's stage. Weights come from a `StageLoader`, modules from `ReplicaCache`; all on
    the device's worker.

    Args:
        model: as the call sees it.
        layer_modes: whether a layer trains and which of its parameters do, all that its behaviour
            may depend on.
        keeps_graphs: it stays, with its weights, from a forward to the backward.
        tokens_at_once: as of `MemoryPlan`.
    """

    def __init__(
        self,
        stage_run: StageRun,
        model: ModelThen,
        layer_modes: dict[int, tuple[bool, ...]],
        timer: Timer,
        *,
        keeps_graphs: bool = False,
        tokens_at_once: int = 0,
    ) -> None:
        self.tokens_at_once = tokens_at_once
        self.stage_run = stage_run
        self.keeps_graphs = keeps_graphs
        self.is_parked = False
        self.modes = model.modes
        self.layer_modes = layer_modes
        self.weights = model.weights
        self.timer = timer
        self.uploaded: dict[int, UploadedLayer] = {}
        self.replicas: dict[int, Replica] = {}
        self.residents: dict[int, ReplicaParameters] = {}
        # Layers whose forwards are over and have set nothing on their modules.
        self.untouched: set[int] = set()
        self.watches: dict[int, LayerWatch] = {}
        self.departures: dict[int, Departure] = {}
        self._offloader: Offloader | None = None

    def give_up(self) -> None:
        """Nobody will compute with it: no copies into its slots are queued any more."""
        for uploaded in self.uploaded.values():
            uploaded.sent.give_up()

    def holds(self, leaf: Any) -> bool:
        """Whether it is memory of one of the stage's slots: a weight, or a view of one, that a
        layer has returned."""
        address = address_of(leaf)
        return address != 0 and any(
            address_of(uploaded.slot.buffer) == address for uploaded in self.uploaded.values()
        )

    def apart(self, layer: int, value: Any, output: Any) -> Any:
        """What a layer has returned for ``value``, without memory of its buffers, which it may
        write to for the next microbatch. Only looks where it has to: not at what a graph has made,
        nor at what went in."""
        looked_at = [output]
        # Taken apart are only what is not handed on as it is.
        if type(output) is dict and type(value) is dict:
            looked_at = [item for name, item in output.items() if item is not value.get(name)]
        leaves = [
            leaf for item in looked_at for leaf in tensor_leaves(item) if leaf.grad_fn is None
        ]
        if not leaves:
            return output
        own = {address_of(tensor) for tensor in self._tensors_held(layer)} - {0}
        if not own or set(map(id, leaves)) <= set(map(id, pytree.tree_leaves(value))):
            return output
        return pytree.tree_map(
            lambda leaf: copied(leaf) if address_of(leaf) in own else leaf, output
        )

    def _tensors_held(self, layer: int) -> list[torch.Tensor]:
        """As buffers or plain attributes. Mostly none: a replica that is as it was made has only
        buffers, by [3] in [Note: replicas used again], and among some hundred values of another one
        there are a dozen types."""
        replica = self.replicas[layer]
        parts = [
            part for _, part in (replica.with_buffers if replica.is_as_made else replica.pairs)
        ]
        held = list(
            chain.from_iterable(
                chain(part._buffers.values(), part.__dict__.values()) for part in parts
            )
        )
        if not any(issubclass(kind, torch.Tensor) for kind in set(map(type, held))):
            return []
        return [value for value in held if isinstance(value, torch.Tensor)]

    def let_go(self, boundary: Boundary) -> Boundary:
        """The boundary without memory of slots, which will hold other weights when somebody reads
        it."""
        return boundary._replace(
            leaves=tuple(copied(leaf) if self.holds(leaf) else leaf for leaf in boundary.leaves)
        )

    def depart(self, layer: int, value: Any, compute: Lane) -> None:
        """The layer is about to run for its last backward; ``value`` goes into it."""
        self.departures[layer] = Departure(
            compute, pytree.tree_leaves(value), trains=any(self.layer_modes[layer][1:])
        )

    @property
    def accumulators(self) -> list[Accumulator]:
        """In the order in which layers were first run."""
        return [residents.accumulator for residents in self.residents.values()]

    def open(self, layer: int, residents: ReplicaParameters, replica: Replica) -> None:
        """The layer can run."""
        self.residents[layer] = residents
        self.replicas[layer] = replica
        residents.accumulator.offloader = self._offloader

    def offload_when_complete(self, offloader: Offloader) -> None:
        """The last microbatch begins: layers send their gradients down as soon as they have all."""
        self._offloader = offloader
        for accumulator in self.accumulators:
            accumulator.offloader = offloader


class MicrobatchRun(NamedTuple):
    """One microbatch in one stage run: all that is said of where a layer runs, but for the layer.

    ``again``: it is a recompute. ``first_kept``: layers from there on leave what one starts from.
    """

    call: Call
    stage: Stage
    microbatch: int
    again: bool
    first_kept: int

    @classmethod
    def of(cls, call: Call, stage: Stage, microbatch: int) -> "MicrobatchRun":
        pass_, first_kept = stage.stage_run.pass_, call.model.num_layers
        if pass_ is Pass.FORWARD and not stage.keeps_graphs:
            first_kept = min(call.memory.saved_layers, default=first_kept)
        return cls(call, stage, microbatch, pass_ is Pass.BACKWARD, first_kept)

    @property
    def is_first(self) -> bool:
        return self.microbatch == self.stage.stage_run.microbatches[0]

    @property
    def is_last(self) -> bool:
        return self.microbatch == self.stage.stage_run.microbatches[-1]
