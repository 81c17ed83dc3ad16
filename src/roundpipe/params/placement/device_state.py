"""Layers that live on a device, optimizer state included, because there is memory to spare.

[Note: device states] A layer with a *device state* has its masters, its moments and its weights on
a device. Its gradients offload there, its updates are computed there, and nothing of it goes up or
down, so that a model that fits into a device trains as if it had always been there. On the host
everything keeps its place, in optimizers and checkpoints too: the tensors are held, whoever touches
one has its newest value fetched first, and the next update takes it along again. What is where is
`newest.py`'s to know; here is the memory.

[1] The weights are one or two *images* that calls compute with in place of a slot.
[2] All that touches a device state's memory is queued on the compute lane, so its order is the
    order of queueing: a worker computes with a version of a layer only when that is written back,
    and that is said when its update is queued.
[3] Masters and moments are pageable on the host, so they go to the device and back through a few
    page-locked slices (`memory/copier.py`), which all device states share and nobody has before the
    first is taken or after the last was given up.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from ...device import Device
from ...kernels.updates import RuleUpdate
from ...memory.copier import Pair, PinnedCopier
from ...memory.pinning import HostMemory
from ..working import LayerParameters, ParameterStore, ParameterUse, view_of
from .held import free, holder_of
from .newest import Hold

# Steps in a row between which somebody looked at a layer's state, after which it stays on the host.
_PATIENCE = 3


_Stamps = tuple[tuple[int, int], ...]


class Link(NamedTuple):
    """The device that device states are on, and how values get there and back."""

    device: Device
    copies: PinnedCopier


class DeviceState:
    """One layer's. ``lock`` is held while tensors that are on the device change hands.

    Written by the thread that writes back; workers read images.
    """

    def __init__(
        self, layer: LayerParameters, num_bytes: int, link: Link, lock: threading.RLock
    ) -> None:
        self.layer = layer
        self.group = [self]  # with those of layers that have weights in common with this one
        self.device = link.device
        self.lock = lock
        self.num_bytes = num_bytes
        self._copies = link.copies
        self._was_looked_at = False  # since the latest update
        self.is_unwanted = False
        self._patience = _PATIENCE
        self._holds: dict[int, Hold] = {}  # what is on the device, by the id of the master
        self._images: list[torch.Tensor] = []
        self._views: list[dict[int, torch.Tensor]] = []  # of each image, by place in the layer
        self._stamps: list[_Stamps] = []  # by image, of the user's parameters when it was written

    def work(self) -> AbstractContextManager[None]:
        """For the time in which something is computed with what is on the device."""
        return self.device.compute.work()

    def end(self) -> None:
        """Nothing of it is on the device any more. Said because device states are part of a circle,
        the group: what is in here would stay until the circle is found."""
        self._images.clear()
        self._views.clear()
        self._stamps.clear()
        self.group.clear()

    @property
    def held_bytes(self) -> int:
        """What is on the device."""
        there = (tensor for held in list(self._holds.values()) for tensor in held.there)
        return sum(tensor.nbytes for tensor in (*self._images, *there))

    # Masters and moments.

    def adopt(self, holds: Sequence[Hold]) -> None:
        """Takes those that it can. On the optimizer thread, together because that takes less time;
        blocks until the values are there, because updates there need not be operations of
        torch's."""
        taken = [(held, there) for held in holds if (there := self._room_for(held)) is not None]
        with torch._C.DisableTorchFunctionSubclass():
            self._copies.up([pair for held, there in taken for pair in _pairs(held, there)])
        for held, there in taken:
            held.there, held.device_state = there, self
            self._holds[id(held.tensors[0])] = held

    def _room_for(self, held: Hold) -> tuple[torch.Tensor, ...] | None:
        if self.is_unwanted or not held.update.can_move:
            return None
        try:
            with self.work():
                return tuple(
                    torch.empty(t.shape, dtype=t.dtype, device=self.device.torch_device)
                    for t in held.tensors
                )
        except torch.OutOfMemoryError:
            self.is_unwanted = True
            return None

    def fetch_for(self, held: Hold, tensor: torch.Tensor) -> None:
        """Somebody looks at a tensor that was held, on whichever thread."""
        with self.lock:
            if holder_of(tensor) is held and held.decided is None:
                self._fetch([held])
                self._was_looked_at = True

    def fetch_all(self) -> None:
        """Nothing is on the device any more but images. No update may be pending."""
        with self.lock:
            self._fetch(list(self._holds.values()))

    def _fetch(self, holds: Sequence[Hold]) -> None:
        """Brings their values to the host, where they are used from now on. Under the lock.

        Each is let go of as soon as its value is there. An interrupt in between leaves the others
        held: whoever touches one of them next fetches those.
        """
        # Others are there already, if an interrupt has ended this half-way, and may have been
        # written since.
        left = [
            (held, own, pair)
            for held in holds
            for own, pair in zip(held.tensors, _pairs(held, held.there), strict=True)
            if holder_of(own) is held
        ]

        def is_held(index: int) -> bool:
            # Else a signal's handler has looked, and perhaps written, meanwhile.
            held, own, _ = left[index]
            return holder_of(own) is held

        self._copies.down(
            [pair for _, _, pair in left], is_held, lambda index: free(left[index][1])
        )
        for held in holds:
            self._holds.pop(id(held.tensors[0]), None)

    # Weights: two images at most, numbered 0 and 1.

    def image(self, index: int) -> torch.Tensor | None:
        """None if the user has written to his own parameters since it was written."""
        return self._images[index] if self._stamps[index] == _stamps(self.layer) else None

    def owns(self, image: torch.Tensor) -> bool:
        """Whether it is one of the images there are."""
        return any(own is image for own in list(self._images))

    def in_image(self, index: int, uses: Sequence[ParameterUse]) -> list[torch.Tensor]:
        views = self._views[index]
        for use in uses:
            if use.place not in views:
                views[use.place] = view_of(self._images[index], use)
        return [views[use.place] for use in uses]

    def has_image(self, index: int) -> bool:
        """Makes it if there is room."""
        if index == len(self._images):
            try:
                self.add_image()
            except torch.OutOfMemoryError:
                self.is_unwanted = True
                return False
        return True

    def add_image(self) -> None:
        with self.work():
            image = torch.empty(
                self.layer.num_bytes, dtype=torch.uint8, device=self.device.torch_device
            )
        self._stamps.append(())
        self._images.append(image)
        self._views.append({})

    def note_written(self, index: int) -> None:
        """An update has written that image."""
        self._stamps[index] = _stamps(self.layer)
        self._patience = self._patience - 1 if self._was_looked_at else _PATIENCE
        self._was_looked_at = False
        self.is_unwanted |= self._patience == 0

    def bring_home(self, image: torch.Tensor) -> None:
        """Copies it to the user's own parameters. Blocks."""
        self._copies.down(
            [Pair(use.parameter.data, view_of(image, use)) for use in self.layer.uses]
        )


def state_bytes(images: Sequence[int], state: int, gradient_bytes: int) -> list[int]:
    """What each layer of a group may take of a device, the first with the group's masters and
    moments, ``state``, and gradients that come while an update still reads others."""
    first, *others = images
    return [2 * first + state + gradient_bytes, *(2 * image for image in others)]


def _pairs(held: Hold, there: Sequence[torch.Tensor]) -> list[Pair]:
    with torch._C.DisableTorchFunctionSubclass():
        return [Pair(own.data, away) for own, away in zip(held.tensors, there, strict=True)]


def _stamps(layer: LayerParameters) -> _Stamps:
    return tuple((use.parameter.data_ptr(), use.parameter._version) for use in layer.uses)


class DeviceStates:
    """All device states, on one device. The optimizer thread takes some, the caller gives them up
    while that is idle.

    Args:
        device: None if there can be none, because several devices would need the same weights.
        memory: where the slices come from that state passes through.
    """

    def __init__(self, store: ParameterStore, device: Device | None, memory: HostMemory) -> None:
        self._store = store
        self._link: Link | None = None
        if device is not None:
            most = max(
                sum(4 * use.parameter.numel() for use in layer.uses) for layer in store.layers
            )
            self._link = Link(device, PinnedCopier(device.compute, memory, most))
        self._lock = threading.RLock()
        self._refused: set[int] = set()
        self._most = float("inf")
        self._limit = 0.0

    def take(
        self, layers: Sequence[LayerParameters], updates: Sequence[RuleUpdate], gradient_bytes: int
    ) -> DeviceState | None:
        """Device states for layers whose parameters all have an update to come, if there is room;
        shallow ones ask first.

        Args:
            layers: one, or all that have weights in common.
            gradient_bytes: of their gradients, if those have no room where the second images would
                be.

        Returns:
            That of the first.
        """
        refused = self._refused | self._store.written
        # An image is sent as it lies on the host, so it has no room for what is made from parts.
        if self._link is None or any(
            layer.layer in refused or layer.has_quantized for layer in layers
        ):
            return None
        with torch._C.DisableTorchFunctionSubclass():  # because pending updates are only looked at
            if not all(update.can_move for update in updates):
                return None
            state = sum(t.nbytes for update in updates for t in (update.weight, *update.moments))
        num_bytes = state_bytes([layer.num_bytes for layer in layers], state, gradient_bytes)
        group = [
            DeviceState(layer, own_bytes, self._link, self._lock)
            for layer, own_bytes in zip(layers, num_bytes, strict=True)
        ]
        # A call may be asking for this room: it finds it taken, or this finds it gone.
        with self._lock:
            if self.num_bytes + sum(num_bytes) > self._limit:
                return None
            try:
                for device_state in group:
                    # Of all, because a tied weight is written to all of them or to none.
                    device_state.add_image()
            except torch.OutOfMemoryError:
                self._most = self._limit = self.num_bytes
                return None
            for device_state in group:
                device_state.group = group
                self._store.device_states[device_state.layer.layer] = device_state
        return group[0]

    @property
    def can_be(self) -> bool:
        """Whether there can be any."""
        return self._link is not None

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._limit

    @property
    def num_bytes(self) -> int:
        """What they may take."""
        return sum(each.num_bytes for each in list(self._store.device_states.values()))

    @property
    def held_bytes(self) -> int:
        """What they take. With no update under way."""
        return sum(each.held_bytes for each in self._store.device_states.values())

    # Called by the caller's thread.

    def let(self, num_bytes: float, *, is_sure: bool, is_worth_it: bool) -> None:
        """What calls leave of the device.

        Args:
            is_sure: by measurements; the least of such calls counts from then on, so that device
                states do not come and go.
            is_worth_it: whether more device states would make training faster.
        """
        with self._lock:
            if is_sure:
                self._most = min(self._most, num_bytes)
                self._limit = self._most if is_worth_it else min(self._most, self.num_bytes)
            else:
                self._limit = min(self._limit, num_bytes)

    def note_failure(self, error: BaseException) -> None:
        """On any thread. Where the device's memory did not suffice with device states there, there
        are to be none any more."""
        if isinstance(error, torch.OutOfMemoryError) and self._store.device_states:
            self._most = self._limit = 0.0

    @contextmanager
    def noting_failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.note_failure(error)
            raise

    @property
    def must_shrink(self) -> bool:
        with self._lock:
            is_one_unwanted = any(each.is_unwanted for each in self._store.device_states.values())
            return is_one_unwanted or self.num_bytes > self._limit

    def leaving(self) -> Iterator[list[DeviceState]]:
        """Those to be given up now in groups, deepest first. Each is to be before the next is asked
        for."""
        for index in sorted(self._store.device_states, reverse=True):
            device_state = self._store.device_states.get(index)
            if device_state is None:
                continue
            is_unwanted = any(each.is_unwanted for each in device_state.group)
            if is_unwanted or self.num_bytes > self._limit:
                self._refused.update(each.layer.layer for each in device_state.group if is_unwanted)
                yield list(device_state.group)  # a copy, because the group's own ends

    def give_up(self, group: Sequence[DeviceState]) -> None:
        """Their optimizer state is on the host from here on; their weights must be already.

        All of a group or, if that raises, none: a weight that they have in common is written to all
        of them.
        """
        for device_state in group:
            device_state.fetch_all()
        for device_state in group:
            self._store.device_states.pop(device_state.layer.layer, None)
        for device_state in group:
            device_state.end()
        if not self._store.device_states and self._link is not None:
            self._link.copies.close()

    def clear(self) -> None:
        """Gives up all, after a flush."""
        while self._store.device_states:
            device_state = next(iter(self._store.device_states.values()))
            self.give_up(list(device_state.group))
