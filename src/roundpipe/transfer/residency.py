"""Weights that stay on a device between stage runs, so that what has not changed need not go up
again.

[Note: residency] A kept layer holds on to its slot when its stage run is over. For every parameter
the slot has a *stamp* of the working copy it was filled from, and the next stage run sends only
those whose stamp differs: nothing of a frozen weight, and nothing at all from a forward stage run
to the backward stage run of the same call. The stage runs of one call compute with one version and
may share a slot. A slot is written again only by a later call, whose actions this device's worker
begins when those of the call before are done. But a slot that a kept graph reads (it is *lent*)
is written by nobody until that has been through its backward: if its layer has to go meanwhile, or
needs other weights, whoever it is lent to gives it back.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..device import Event
from ..memory.slots import Slot, SlotPool
from ..params.working import LayerParameters, ParameterUse
from .sender import Sent

FROZEN = -1


class WeightsVersion(NamedTuple):
    """Tells which working weights a call computes with: those after step ``version``, or loaded
    since."""

    version: int
    num_loads: int


class Stamp(NamedTuple):
    """Two equal stamps of a parameter stand for the same values.

    ``writes`` is torch's count of in-place writes; ``replaced`` counts memories, because an address
    may be used again; ``version`` is ``FROZEN`` where steps leave the weight alone.
    """

    address: int
    replaced: int
    writes: int
    num_loads: int
    version: int


class _FilledSlot(NamedTuple):
    slot: Slot
    stamps: Sequence[Stamp]
    sent: Sent


class Residency:
    """The slots of one device that are not given back. Used by that device's worker."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._wanted: frozenset[int] = frozenset()
        self._lent: Counter[int] = Counter()  # by the slot's identity, to how many
        self._held: dict[int, _FilledSlot] = {}

    def __repr__(self) -> str:
        return f"<Residency: {len(self._held)} layers of {len(self._wanted)} wanted>"

    def want(self, layers: frozenset[int]) -> None:
        """A call begins that wants ``layers`` kept; others go back to the pool."""
        self._wanted = layers
        self._let_go(self._held.keys() - layers)

    def missing(self) -> frozenset[int]:
        """Wanted, and not held yet."""
        return self._wanted - self._held.keys()

    def claim(
        self, layer: LayerParameters, stamps: Sequence[Stamp]
    ) -> tuple[Slot, tuple[ParameterUse, ...], Sent | None]:
        """A slot for the layer, which parameters have to be sent into it, and the filling to wait
        for if none has."""
        held = self._held.get(layer.layer)
        if held is None:
            return self._slots.take(layer.num_bytes), layer.uses, None
        stale = tuple(use for use in layer.uses if held.stamps[use.place] != stamps[use.place])
        if not stale:
            return held.slot, (), held.sent
        if self._lent[id(held.slot.buffer)]:
            self._let_go([layer.layer])
            return self._slots.take(layer.num_bytes), layer.uses, None
        del self._held[layer.layer]  # until it is filled again, because sending may fail half-way
        return held.slot, stale, None

    def filled(
        self, layer: LayerParameters, slot: Slot, stamps: Sequence[Stamp], sent: Sent
    ) -> None:
        """Everything that ``slot`` lacked is on its way."""
        if layer.layer in self._wanted:
            self._held[layer.layer] = _FilledSlot(slot, stamps, sent)

    def lend(self, slot: torch.Tensor) -> None:
        """Something will read the slot after its stage run is over, until it is returned."""
        self._lent[id(slot)] += 1

    def returned(self, slot: torch.Tensor) -> None:
        """One that it was lent to is about to release it."""
        self._lent[id(slot)] -= 1
        self._lent += Counter()  # drops what is nobody's

    def release(self, layer: LayerParameters, slot: Slot, free: Event) -> None:
        """A stage run is over; the slot may be written by work that waits for ``free``."""
        if self.holds(layer.layer, slot.buffer):
            self._held[layer.layer] = self._held[layer.layer]._replace(slot=Slot(slot.buffer, free))
        elif not self._lent[id(slot.buffer)]:
            self._slots.give_back(slot.buffer, free)

    def holds(self, layer: int, slot: torch.Tensor) -> bool:
        """Whether the layer stays in that slot."""
        held = self._held.get(layer)
        return held is not None and held.slot.buffer is slot

    def clear(self) -> None:
        """Nothing is known of what slots hold any more. No stage run may be under way."""
        self._let_go(list(self._held))

    def _let_go(self, layers: set[int] | list[int]) -> None:
        for layer in layers:
            slot = self._held.pop(layer).slot
            if not self._lent[id(slot.buffer)]:
                self._slots.give_back(slot.buffer, slot.free)
