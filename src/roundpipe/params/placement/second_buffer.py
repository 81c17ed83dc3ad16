"""A second working copy of what steps change in a layer, so that an update need not wait until the
first has been read.

Of a layer with adapters they alone are there twice: frozen weights are never written.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...memory.pinning import HostMemory

if TYPE_CHECKING:
    from ..working import ParameterUse


class SecondBuffer:
    """Memory for the parameters ``uses``. ``image``: the bytes of the layer's image from ``offset``
    on."""

    def __init__(self, uses: "Sequence[ParameterUse]", num_bytes: int, memory: HostMemory) -> None:
        self.offset = min(use.offset for use in uses)
        arena = memory.arena(num_bytes)
        self.image = arena.bytes
        self.tensors: Mapping[int, torch.Tensor] = {
            use.place: arena.tensor(
                use.offset - self.offset, use.parameter.shape, use.parameter.dtype
            )
            for use in uses
        }
