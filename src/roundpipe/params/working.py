"""Which parameters belong to which layer, where their working copies live, and their names in the
user's model."""

import copy
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from ..memory.pinning import HostArena, HostMemory
from ..memory.slot_sizes import ALIGNMENT
from ..quantized import QuantizedWeight, stored_bytes
from ..system.host_memory import return_freed
from ..system.progress import progress
from .placement.newest import Whereabouts
from .placement.second_buffer import SecondBuffer
from .refusals import refuse_kind, refuse_overlaps
from .writes import Writes

if TYPE_CHECKING:
    from .placement.device_state import DeviceState


class ParameterUse(NamedTuple):
    """One parameter in one layer. A parameter tied over several layers has one use in each.

    ``place`` numbers the layer's parameters; ``offset`` is the byte position of its dense values in
    the layer's slot. A quantized one comes there as its parts, at ``parts_at``.
    """

    layer: int
    place: int
    parameter: nn.Parameter
    offset: int
    parts_at: tuple[int, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return bool(self.parts_at)

    @property
    def image_offset(self) -> int:
        """Where what goes up of it begins."""
        return self.parts_at[0] if self.parts_at else self.offset

    @property
    def image_bytes(self) -> int:
        """How much of it goes up."""
        return stored_bytes(self.parameter)

    @property
    def sources(self) -> list[tuple[int, torch.Tensor]]:
        """The tensors on the host that its value lies in, each with its byte position in the
        layer's image."""
        if isinstance(self.parameter, QuantizedWeight):
            return list(zip(self.parts_at, self.parameter.parts, strict=True))
        return [(self.offset, self.parameter.detach())]


@dataclass(frozen=True)
class LayerParameters:
    """The parameters of one layer and the layout of its slot: first its *image*, ``image_bytes``
    that go up, then the dense values of quantized weights, which the device makes from them."""

    layer: int
    uses: tuple[ParameterUse, ...]
    num_bytes: int
    image_bytes: int

    @property
    def has_quantized(self) -> bool:
        return self.num_bytes > self.image_bytes

    @property
    def has_frozen(self) -> bool:
        return len(self.trainable) < len(self.uses)

    @property
    def trainable(self) -> tuple[ParameterUse, ...]:
        return tuple(use for use in self.uses if use.parameter.requires_grad)

    @property
    def trained_bytes(self) -> int:
        """The bytes of those that are trained, as they are kept."""
        return sum(use.parameter.nbytes for use in self.trainable)

    @property
    def num_elements(self) -> int:
        return sum(use.parameter.numel() for use in self.uses)


class ParameterStore:
    """All parameters of a sequence of layers.

    [Note: parameter copies] The *working* copy is the user's own ``nn.Parameter``; with
    ``pin_model="alloc"`` its data is moved into the layer's page-locked arena, so that a layer goes
    up in one copy while each parameter still has a storage of its own. *Masters* (see masters.py)
    belong to the optimizer and are written back after its steps. *Resident* copies are views of a
    slot and live for one stage run.

    Args:
        on_host: parameters that the caller's thread computes with. Each makes up one more layer,
            which is uploaded to no device; one that a staged layer has too is tied.
        device: where weights have to be. On the meta device they are only planned with.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        memory: HostMemory,
        on_host: Sequence[nn.Parameter] = (),
        *,
        device: str = "cpu",
    ) -> None:
        staged = tuple(_layout(index, layer, device) for index, layer in enumerate(layers))
        host = (
            ParameterUse(index, 0, parameter, 0)
            for index, parameter in enumerate(on_host, len(staged))
        )
        self.on_host = tuple(LayerParameters(use.layer, (use,), 0, 0) for use in host)
        self.layers = (*staged, *self.on_host)
        self.first = 0  # the number of the first layer in the whole store
        self.uses: dict[int, list[ParameterUse]] = {}
        for layer in self.layers:
            for use in layer.uses:
                self.uses.setdefault(id(use.parameter), []).append(use)
        if not self.uses:
            raise ConfigError("the model has no parameters; there is nothing to place on a device")
        self.names: dict[int, str] = {}
        # Those that have a master, also if they are frozen now: an update of theirs may still be on
        # its way.
        self.stepped: set[int] = set()
        self.device_states: dict[int, DeviceState] = {}  # by layer; see [Note: device states]
        self.whereabouts = [Whereabouts(layer, self.device_states) for layer in self.layers]
        self._of_whole = self.whereabouts  # by the layer numbers of uses
        # The ids of parameters that are behind their masters in every copy; [Note: newest values].
        self.ahead: set[int] = set()
        # Layers whose forward has written to a weight, which only a slot may hold then.
        self.written: set[int] = set()
        refuse_overlaps(layers)
        self._memory = memory
        self._arenas: dict[int, tuple[HostArena, int | None]] = {}
        if memory.rehomes:
            self._rehome(memory, staged)
        only_on_host = (key for key, uses in self.uses.items() if uses[0].layer >= len(staged))
        self.writes = Writes(self.parameters, set(only_on_host))
        memory.lock_in_place(
            source
            for uses in self.uses.values()
            for _, source in (uses[0].sources if uses[0].layer < len(staged) else ())
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, in layer order."""
        return [uses[0].parameter for uses in self.uses.values()]

    def outline(self) -> str:
        """Tells layers and what they use from those of another process, if these are others."""
        numbers = {key: number for number, key in enumerate(self.uses)}
        uses = [[numbers[id(use.parameter)] for use in layer.uses] for layer in self.layers]
        weights = [(tuple(one.shape), one.dtype, one.requires_grad) for one in self.parameters]
        mark = zlib.crc32(str((uses, weights)).encode())
        return f"{len(uses)} layers with {len(weights)} weights ({mark:08x})"

    def name_of(self, parameter: nn.Parameter) -> str:
        """Its name in the user's model."""
        return self.names.get(id(parameter), "?")

    def first_trainable_layer(self) -> int:
        """The shallowest layer with something to train; the number of layers if there is none."""
        return next(
            (index for index, layer in enumerate(self.layers) if layer.trainable), len(self.layers)
        )

    def refuse_hooks(self) -> None:
        """Raises ConfigError for a hook on the user's own parameter: devices compute with resident
        copies, so it would silently never run."""
        for parameter in self.parameters:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise ConfigError(
                    f"parameter {self.name_of(parameter)!r} has a gradient hook, which would not "
                    "run: gradients are complete only in step_fn; change master.grad there"
                )

    def part(self, layers: range) -> "ParameterStore":
        """This store as an engine sees it that has only these layers, numbered from 0. What
        parameters there are, their uses and names stay those of the whole."""
        part = copy.copy(self)
        part.first = layers.start
        own = self.layers[layers.start : layers.stop]
        part.layers = tuple(replace(layer, layer=index) for index, layer in enumerate(own))
        part.whereabouts = self.whereabouts[layers.start : layers.stop]
        part._arenas = {
            index - layers.start: arena for index, arena in self._arenas.items() if index in layers
        }
        return part

    def working(self, use: ParameterUse, version: int) -> torch.Tensor:
        """Where the parameter's value at that version lies on the host."""
        home = self.uses[id(use.parameter)][0]
        second = self._of_whole[home.layer].second_at(version)
        if second is not None and home.place in second.tensors:
            return second.tensors[home.place]
        return use.parameter.detach()

    def second_of(self, layer: LayerParameters, version: int) -> SecondBuffer | None:
        """The layer's second buffer, if that is what a call at that version reads. Of a layer of a
        part too."""
        return self._of_whole[layer.uses[0].layer].second_at(version) if layer.uses else None

    def image_of(self, layer: LayerParameters) -> torch.Tensor | None:
        """The user's own parameters of the layer as one block of bytes, if they (still) lie in
        one."""
        arena, first_address = self._arenas.get(layer.layer, (None, None))
        if arena is None or any(
            use.parameter.data_ptr() - use.image_offset != first_address for use in layer.uses
        ):
            return None
        return arena.bytes

    def second_buffer_bytes(self) -> int:
        """What ``make_second_buffers`` would take."""
        return sum(map(_trained_bytes, self._to_have_two_copies()))

    def make_second_buffers(self) -> None:
        """Gives layers a second working copy of what trains, on devices only.

        Where the caller's thread computes with a parameter it has to be up to date itself.
        """
        for layer in self._to_have_two_copies():
            self.whereabouts[layer.layer].second = SecondBuffer(
                layer.trainable, _trained_bytes(layer), self._memory
            )

    def tied_with(self, layer: LayerParameters) -> list[LayerParameters]:
        """The layer and all that have weights in common with it or with each other, shallow
        first."""
        found, wanted = set[int](), {layer.layer}
        while wanted:
            found |= wanted
            parameters = (id(use.parameter) for index in wanted for use in self.layers[index].uses)
            wanted = {use.layer for key in parameters for use in self.uses[key]} - found
        return [self.layers[index] for index in sorted(found)]

    def _to_have_two_copies(self) -> list[LayerParameters]:
        if self._memory.needs_staging:
            return []  # because who leaves weights where they are has no memory for them
        on_host = {
            id(use.parameter) for layer in self.layers if layer.num_bytes == 0 for use in layer.uses
        }
        return [
            layer
            for layer in self.layers
            if layer.num_bytes
            and layer.layer not in self.device_states
            and layer.trainable
            and all(
                use == self.uses[id(use.parameter)][0] and id(use.parameter) not in on_host
                for use in layer.trainable
            )
        ]

    def _rehome(self, memory: HostMemory, layers: Sequence[LayerParameters]) -> None:
        """Moves working copies into one arena per layer, as they lie in its image. A tied parameter
        moves with its first layer; later ones have no room for it, and no image."""
        for layer in progress(layers, desc="Moving weights", unit="layer"):
            own = [
                use for use in layer.uses if self.uses[id(use.parameter)][0].layer == layer.layer
            ]
            if not own:
                continue
            is_whole = len(own) == len(layer.uses)
            arena = memory.arena(layer.image_bytes if is_whole else _packed_bytes(own))
            at = 0
            for use in own:
                homes = []
                for offset, source in use.sources:
                    place = offset if is_whole else at
                    homes.append(arena.tensor(place, source.shape, source.dtype).copy_(source))
                    at += _aligned(source.nbytes)
                if isinstance(use.parameter, QuantizedWeight):
                    use.parameter.move_to(homes)
                else:
                    (use.parameter.data,) = homes
            # Kept, because a copy may be on its way when its user puts another in a weight's place.
            self._arenas[layer.layer] = (arena, arena.bytes.data_ptr() if is_whole else None)
            # Because of small weights, as quantized ones are, malloc keeps what was freed: without
            # this the model would be in memory twice while its last layers move.
            return_freed()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _packed_bytes(uses: Iterable[ParameterUse]) -> int:
    return sum(_aligned(source.nbytes) for use in uses for _, source in use.sources)


def _trained_bytes(layer: LayerParameters) -> int:
    """From the first to the last byte of what trains, which lies together."""
    places = [(use.offset, use.offset + use.parameter.nbytes) for use in layer.trainable]
    return max(end for _, end in places) - min(begin for begin, _ in places)


def view_of(image: torch.Tensor, use: ParameterUse) -> torch.Tensor:
    """The parameter's place in its layer's image or slot, in its shape and dtype."""
    return _view(image, use.offset, use.parameter)


def parts_of(slot: torch.Tensor, use: ParameterUse) -> list[torch.Tensor]:
    """The places of what ``sources`` has, in the layer's image or slot."""
    return [_view(slot, offset, source) for offset, source in use.sources]


def _view(image: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return image[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _layout(index: int, module: nn.Module, device: str) -> LayerParameters:
    named = list(module.named_parameters())
    for name, parameter in named:
        refuse_kind(f"layer {index}: parameter {name!r}", parameter, device)
    end, offsets, parts_at = 0, dict[int, int](), dict[int, tuple[int, ...]]()

    def place(tensor: torch.Tensor) -> int:
        nonlocal end
        begin, end = end, end + _aligned(tensor.nbytes)
        return begin

    quantized = [p for _, p in named if isinstance(p, QuantizedWeight)]
    for parameter in quantized:
        parts_at[id(parameter)] = tuple(map(place, parameter.parts))
    # Frozen ones first, because what steps change then lies together and goes up in one copy.
    for _, parameter in sorted(named, key=lambda pair: pair[1].requires_grad):
        if id(parameter) not in parts_at:
            offsets[id(parameter)] = place(parameter)
    image_bytes = end
    for parameter in quantized:
        offsets[id(parameter)] = place(parameter)
    uses = (
        ParameterUse(index, number, p, offsets[id(p)], parts_at.get(id(p), ()))
        for number, (_, p) in enumerate(named)
    )
    return LayerParameters(index, tuple(uses), end, image_bytes)
