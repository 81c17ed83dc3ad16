"""Which parameters belong to which layer, where their working copies live, and their names in the user's model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from ..memory.pinning import HostArena, HostMemory
from ..memory.slots import ALIGNMENT


class ParameterUse(NamedTuple):
    """One parameter in one layer. A parameter tied over several layers has one use in each.

    ``place`` numbers the layer's parameters; ``offset`` is its byte position in the layer's image, the layout of the
    layer's slot.
    """

    layer: int
    place: int
    parameter: nn.Parameter
    offset: int


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer and the layout of its image."""

    layer: int
    uses: tuple[ParameterUse, ...]
    num_bytes: int

    @property
    def trainable(self) -> tuple[ParameterUse, ...]:
        return tuple(use for use in self.uses if use.parameter.requires_grad)


class ParameterStore:
    """All parameters of a sequence of layers.

    [Note: parameter copies] The *working* copy is the user's own ``nn.Parameter``; with ``pin_model="alloc"`` its data
    is moved into the layer's page-locked arena, so that a layer goes up in one copy while each parameter still has a
    storage of its own. *Masters* (see copies.py) belong to the optimizer and are written back by publishing. *Resident*
    copies are views of a slot and live for one visit.
    """

    def __init__(self, layers: Sequence[nn.Module], memory: HostMemory) -> None:
        self.layers = tuple(_layout(index, layer) for index, layer in enumerate(layers))
        self.uses: dict[int, list[ParameterUse]] = {}
        for layer in self.layers:
            for use in layer.uses:
                self.uses.setdefault(id(use.parameter), []).append(use)
        if not self.uses:
            raise ConfigError("the model has no parameters; there is nothing to place on a device")
        self.names: dict[int, str] = {}
        self._arenas: dict[int, tuple[HostArena, int]] = {}
        if memory.rehomes:
            self._rehome(memory)
        memory.lock_in_place(uses[0].parameter.data for uses in self.uses.values())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, in layer order."""
        return [uses[0].parameter for uses in self.uses.values()]

    def name_of(self, parameter: nn.Parameter) -> str:
        """Its name in the user's model."""
        return self.names.get(id(parameter), "?")

    def first_trainable_layer(self) -> int:
        """The shallowest layer with something to train; the number of layers if there is none."""
        for layer in self.layers:
            if layer.trainable:
                return layer.layer
        return len(self.layers)

    def image_of(self, layer: LayerParameters) -> torch.Tensor | None:
        """The layer's working copies as one block of bytes, if they (still) lie in one."""
        arena, first_address = self._arenas.get(layer.layer, (None, 0))
        if arena is None or any(use.parameter.data_ptr() - use.offset != first_address for use in layer.uses):
            return None
        return arena.bytes

    def _rehome(self, memory: HostMemory) -> None:
        """Moves working copies into one arena per layer. A tied parameter moves with its first layer."""
        for layer in self.layers:
            own = [use for use in layer.uses if self.uses[id(use.parameter)][0].layer == layer.layer]
            if not own:
                continue
            arena = memory.arena(layer.num_bytes)
            for use in own:
                home = arena.tensor(use.offset, use.parameter.shape, use.parameter.dtype)
                home.copy_(use.parameter.data)
                use.parameter.data = home
            self._arenas[layer.layer] = (arena, arena.bytes.data_ptr())


def _layout(index: int, module: nn.Module) -> LayerParameters:
    uses: list[ParameterUse] = []
    offset = 0
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            raise ConfigError(
                f"layer {index}: parameter {name!r} is a {type(parameter).__name__}; "
                "only plain nn.Parameter can be staged"
            )
        if parameter.device.type != "cpu":
            raise ConfigError(f"layer {index}: parameter {name!r} is on {parameter.device}; keep the model on the CPU")
        uses.append(ParameterUse(index, len(uses), parameter, offset))
        offset += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    return LayerParameters(index, tuple(uses), offset)
