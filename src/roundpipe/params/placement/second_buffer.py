"""A second working copy of what steps change in a layer, so that an update need not wait until the
first has been read.

[Note: two working copies] Asynchronous step t runs beside calls that still read W_(t-1), so it must
not write where that lies. A layer with a *spare* copy has two places that take turns: the update
writes the idle one, which from then on holds the newest version. Whoever reads a version finds it
in the newest place if that has it already, else in the other. The idle place is free: what it held
was read only by calls made before step t, and those ended before its job began. The user's own
parameter is one of the two places; it is brought up to date when somebody may look, by writing back
there. Of a layer with adapters they alone are there twice: frozen weights are never written.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ...memory.pinning import HostMemory


class Place(NamedTuple):
    """One parameter's place in a layer's image."""

    place: int
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class _Newest(NamedTuple):
    """Which of the two places holds the newest version, and since which."""

    is_spare: bool
    since: int


class SecondBuffer:
    """A second working copy. Written and turned by the thread that writes back, read by workers.

    ``image``: the bytes of the layer's image from ``offset`` on.
    """

    def __init__(self, places: list[Place], num_bytes: int, memory: HostMemory) -> None:
        self.offset = min(place.offset for place in places)
        arena = memory.arena(num_bytes)
        self.image = arena.bytes
        self.tensors: Mapping[int, torch.Tensor] = {
            place: arena.tensor(offset - self.offset, shape, dtype)
            for place, offset, shape, dtype in places
        }
        self._newest = _Newest(is_spare=False, since=0)

    @property
    def is_newest(self) -> bool:
        return self._newest.is_spare

    def holds(self, version: int) -> bool:
        """Whether this copy, and not the user's own parameters, is what a call at that version
        reads."""
        newest = self._newest  # read once, because the writing back thread replaces it meanwhile
        return newest.is_spare == (version >= newest.since)

    def turn(self, is_spare: bool, version: int) -> None:
        """From ``version`` on the newest weights are here, or in the user's own parameters."""
        self._newest = _Newest(is_spare, version)
