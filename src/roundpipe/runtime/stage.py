"""A stage on a device: its weights in slots and its layers' replicas, for the time of one visit."""

import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..device import Device, Event
from ..memory.slots import Slot, SlotPool
from ..params.gradients import Accumulator, GradientRules, LandedLayer
from ..params.store import LayerParameters, ParameterStore
from ..plan.actions import Pass, Visit
from .call import AttributeUpdate, BufferUpdate
from .replica import Modes, attributes_set, pairs, replicate
from .transfer import Boundary, copied


class UploadedLayer(NamedTuple):
    """A layer's weights in a slot, usable once ``ready``."""

    layer: LayerParameters
    slot: Slot
    ready: Event


class BlockCompiler:
    """Compiles each repeated layer class once; all layers of the class, and all their replicas, share the result."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        counts = Counter(type(layer) for layer in layers)
        self._compiled: dict[type, Callable[..., Any]] = {
            kind: torch.compile(kind.forward, dynamic=False) for kind, count in counts.items() if count > 1
        }

    def apply(self, replica: nn.Module) -> None:
        """The replica's ``__call__``, hooks included, now runs the compiled forward."""
        compiled = self._compiled.get(type(replica))
        if compiled is not None and "forward" not in replica.__dict__:
            replica.__dict__["forward"] = types.MethodType(compiled, replica)


class SilentWrites:
    """Which buffers are written without raising their version, as batch norm does with its statistics.

    Learnt by comparing values after a buffer's first forward in each mode. Shared by all devices, because a recompute
    on one must know what a forward on another has shown.
    """

    def __init__(self) -> None:
        self._compared: set[tuple[int, bool]] = set()
        self._written: set[int] = set()

    def happen_to(self, original: torch.Tensor) -> bool:
        return id(original) in self._written

    def happened(self, original: torch.Tensor, copy: torch.Tensor, training: bool, *, look_again: bool) -> bool:
        """Whether a forward in that mode has written ``copy``, whose version says that it has not."""
        if id(original) not in self._written and (look_again or (id(original), training) not in self._compared):
            self._compared.add((id(original), training))
            if not torch.equal(copy.cpu(), original.cpu()):
                self._written.add(id(original))
        return training and id(original) in self._written


_MOST_COPIES = 4096


class BufferCache:
    """Device copies of module buffers, reused while neither side was written."""

    def __init__(self, device: Device, silent: SilentWrites) -> None:
        self._device = device
        self._silent = silent
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor, int]] = {}

    def place(self, original: torch.Tensor) -> torch.Tensor:
        held = self._copies.get(id(original))
        if held is not None and not self._silent.happen_to(original):
            host, host_version, copy, copy_version = held
            if host is original and host._version == host_version and copy._version == copy_version:
                return copy
        if len(self._copies) >= _MOST_COPIES:
            self._copies.clear()  # because modules that make new tensors in every forward would fill it
        copy = original.detach().to(self._device.torch_device, copy=True)
        self._copies[id(original)] = (original, original._version, copy, copy._version)
        return copy

    def is_placed(self, original: torch.Tensor | None, copy: torch.Tensor | None) -> bool:
        """Whether ``copy`` still is what ``place`` gave for ``original``, as far as versions tell."""
        if original is None or copy is None:
            return original is copy
        held = self._copies.get(id(original))
        return held is not None and held[2] is copy and copy._version == held[3]

    def clear(self) -> None:
        self._copies.clear()


class Stage:
    """One visit's stage. Filled by ``StageLoader``; used and released by the same worker.

    ``modes``: per layer, whether it trains and which of its parameters do; what a layer's behaviour may depend on.
    """

    def __init__(self, visit: Visit, flags: Modes) -> None:
        self.visit = visit
        self.flags = flags
        self.uploaded: dict[int, UploadedLayer] = {}
        self.modes: dict[int, tuple[bool, ...]] = {}
        self.modules: dict[int, nn.Module] = {}
        self.accumulators: dict[int, Accumulator] = {}
        self._land: Callable[[Accumulator], LandedLayer] | None = None

    def holds(self, leaf: Any) -> bool:
        """Whether it is memory of one of the stage's slots: a weight, or a view of one, that a layer has returned."""
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return False
        address = leaf.untyped_storage().data_ptr()
        return any(uploaded.slot.buffer.untyped_storage().data_ptr() == address for uploaded in self.uploaded.values())

    def let_go(self, boundary: Boundary) -> Boundary:
        """The boundary without memory of slots, which will hold other weights when somebody reads it."""
        return boundary._replace(leaves=tuple(copied(leaf) if self.holds(leaf) else leaf for leaf in boundary.leaves))

    def land_when_complete(self, land: Callable[[Accumulator], LandedLayer]) -> None:
        """The last microbatch begins: layers send their gradients down as soon as they have all."""
        self._land = land
        for accumulator in self.accumulators.values():
            accumulator.land_when_complete(land)

    def add_accumulator(self, accumulator: Accumulator) -> None:
        self.accumulators[accumulator.layer.layer] = accumulator
        if self._land is not None:
            accumulator.land_when_complete(self._land)


class StageLoader:
    """Brings stages onto one device and takes them off again."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[nn.Module],
        store: ParameterStore,
        rules: GradientRules,
        compiler: BlockCompiler | None,
        silent: SilentWrites,
    ) -> None:
        self._device = device
        self._layers = layers
        self._store = store
        self._rules = rules
        self._compiler = compiler
        self._silent = silent
        self.slots = SlotPool(device)
        self.buffers = BufferCache(device, silent)

    def upload(self, stage: Stage, index: int) -> None:
        """Queues a layer's weights on the up lane; returns at once.

        The working copies must not be written until the lane has read them: publishing waits for the visit's results.
        """
        layer = self._store.layers[index]
        slot = self.slots.take(layer.num_bytes)
        # Noted before anything can fail, so that ``release`` gives the slot back in any case.
        stage.uploaded[index] = UploadedLayer(layer, slot, slot.free)
        self._device.up.wait(slot.free)
        image = self._store.image_of(layer)
        if image is not None:
            self._device.up.copy_(slot.buffer[: image.numel()], image)
        else:
            for use in layer.uses:
                self._device.up.copy_(_view(slot.buffer, use.offset, use.parameter), use.parameter.detach())
        stage.uploaded[index] = UploadedLayer(layer, slot, self._device.up.record())
        module, flags = self._layers[index], stage.flags
        trains = (id(use.parameter) in flags.trains for use in layer.uses)
        stage.modes[index] = (flags.training.get(id(module), module.training), *trains)

    def module(self, stage: Stage, index: int) -> nn.Module:
        """The layer's replica, made when it is first asked for. To be called on the compute lane."""
        if index not in stage.modules:
            self._open(stage, index)
        return stage.modules[index]

    def _open(self, stage: Stage, index: int) -> None:
        layer, slot, ready = stage.uploaded[index]
        self._device.compute.wait(ready)
        accumulator = Accumulator(layer, self._rules)
        residents: dict[int, nn.Parameter] = {}
        for use in layer.uses:
            view = _view(slot.buffer, use.offset, use.parameter)
            trains = id(use.parameter) in stage.flags.trains
            resident = nn.Parameter(view, requires_grad=trains)
            if trains and stage.visit.pass_ is not Pass.FORWARD:
                accumulator.attach(use, resident)
            residents[id(use.parameter)] = resident
        replica = replicate(self._layers[index], residents, self.buffers.place, stage.flags)
        if self._compiler is not None:
            self._compiler.apply(replica)
        stage.modules[index] = replica
        stage.add_accumulator(accumulator)

    def buffer_updates(self, stage: Stage) -> list[BufferUpdate]:
        """The buffers that the visit's forwards changed."""
        updates = []
        ready = self._device.compute.record()
        for owner, replica in self._pairs(stage):
            names = [name for name, value in replica._buffers.items() if self._is_replaced(owner, name, value)]
            for name, value in replica._buffers.items():
                # If a module wrote one buffer openly, it may have written the others silently.
                if name in names or self._is_written_silently(owner, name, value, look_again=bool(names)):
                    updates.append(BufferUpdate(owner, name, value, self._device, ready))
        return updates

    def attribute_updates(self, stage: Stage) -> list[AttributeUpdate]:
        """The plain attributes that the visit's forwards set."""
        return [
            AttributeUpdate(owner, name, value)
            for owner, replica in self._pairs(stage)
            for name, value in attributes_set(owner, replica)
        ]

    def _pairs(self, stage: Stage) -> Iterator[tuple[nn.Module, nn.Module]]:
        for index, replica in stage.modules.items():
            yield from pairs(self._layers[index], replica)

    def _is_replaced(self, owner: nn.Module, name: str, value: torch.Tensor | None) -> bool:
        return not self.buffers.is_placed(owner._buffers.get(name), value)

    def _is_written_silently(
        self, owner: nn.Module, name: str, value: torch.Tensor | None, *, look_again: bool
    ) -> bool:
        original = owner._buffers.get(name)
        if original is None or value is None:
            return False
        return self._silent.happened(original, value, owner.training, look_again=look_again)

    def release(self, stage: Stage) -> None:
        """The slots may be overwritten once the compute lane is past this point."""
        stage.modules.clear()
        stage.accumulators.clear()
        free = self._device.compute.record()
        for uploaded in stage.uploaded.values():
            self.slots.give_back(uploaded.slot.buffer, free)
        stage.uploaded.clear()


def _view(buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    return buffer[offset : offset + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
