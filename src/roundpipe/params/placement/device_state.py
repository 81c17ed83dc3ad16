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
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from ...device import Device
from ...memory.copier import Pair, PinnedCopier
from ..working import LayerParameters, ParameterUse, view_of
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
