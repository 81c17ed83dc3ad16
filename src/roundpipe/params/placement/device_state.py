"""Layers that live on a device, optimizer state included, because there is memory to spare.

[Note: device states] A layer with a *device state* has its masters, its moments and its weights on
a device. Its gradients offload there, its updates are computed there, and nothing of it goes up or
down, so that a model that fits into a device trains as if it had always been there. On the host
everything keeps its place, in optimizers and checkpoints too: the tensors are held (see [Note:
pending updates]), whoever touches one has its newest value fetched first, and the next update takes
it along again.

[1] The weights are an *image* that calls compute with in place of a slot. An asynchronous update
    writes the idle one of two, as in [Note: two working copies]; a synchronous one writes the only
    one, which no call reads then.
[2] The user's own parameters are brought up to date when somebody may look, by a flush. From then
    on calls compute with those, whatever is written there, until the next update.
[3] All that touches a device state's memory is queued on the compute lane, so its order is the
    order of queueing: a worker computes with a version of a layer only when that is written back,
    and that is said when its update is queued.
[4] Masters and moments are pageable on the host, so they go to the device and back through a few
    page-locked slices (`memory/copier.py`), which all device states share and nobody has before the
    first is taken or after the last was given up.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from ...device import Device
from ...memory.copier import Pair, PinnedCopier
from ...memory.pinning import HostMemory
from ..working import LayerParameters, ParameterStore, view_of
from .pending import Decided, Update, free, holder_of

# Steps in a row between which somebody looked at a layer's state, after which it stays on the host.
_PATIENCE = 3


_Stamps = tuple[tuple[int, int], ...]


class Link(NamedTuple):
    """The device that device states are on, and how values get there and back."""

    device: Device
    copies: PinnedCopier


class _Newest(NamedTuple):
    """Which image holds the newest version, and since which."""

    image: int
    since: int


class _Away:
    """One master and its moments on the device. Made and passed on by the optimizer thread, settled
    by any."""

    def __init__(
        self, device_state: "DeviceState", host: tuple[Any, ...], there: tuple[torch.Tensor, ...]
    ) -> None:
        self.place = device_state
        self.host = host
        self.there = there

    def pass_on(self, decided: Decided) -> bool:
        with self.place.lock:  # because another thread may be fetching them
            own = decided.tensors
            are_these = len(own) == len(self.host) and all(
                a is b for a, b in zip(own, self.host, strict=True)
            )
            if not are_these or any(holder_of(tensor) is not self for tensor in own):
                return False
            for tensor in own:
                tensor._holder = decided
            decided.away = self
            return True

    def take_back(self, tensors: Sequence[Any]) -> None:
        with self.place.lock:  # because whoever touches one of them meanwhile fetches all
            for tensor in tensors:
                tensor._holder = self

    def moved(self, update: Update) -> Update:
        return update.moved(self.there[0], self.there[1:])

    def settle(self, tensor: torch.Tensor) -> None:
        with self.place.lock:
            if holder_of(tensor) is self:
                self.place.fetch([self])
                self.place.was_touched = True

    def pairs(self) -> list[Pair]:
        """All of them, not held."""
        with torch._C.DisableTorchFunctionSubclass():
            return [Pair(own.data, there) for own, there in zip(self.host, self.there, strict=True)]


def value_of(master: torch.Tensor) -> torch.Tensor | None:
    """A master's newest value, if that is on a device."""
    holder = holder_of(master)
    return holder.there[0] if isinstance(holder, _Away) else None


class DeviceState:
    """One layer's. ``lock`` is held while tensors change their holder.

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
        self.was_touched = False  # since the latest update
        self.is_unwanted = False
        self.is_home = True  # the user's own parameters are as new as the newest image
        self._patience = _PATIENCE
        self._away: dict[int, _Away] = {}
        self._images: list[torch.Tensor] = []
        self._stamps: list[_Stamps] = []  # by image, of the user's parameters when it was written
        self._newest = _Newest(image=0, since=0)
        self._written = 0  # the image that targets were asked of last

    def work(self) -> AbstractContextManager[None]:
        return self.device.compute.work()

    def end(self) -> None:
        """Nothing of it is on the device any more. Said because device states are part of a circle,
        the group: what is in here would stay until the circle is found."""
        self._images.clear()
        self._stamps.clear()
        self.group.clear()

    @property
    def held_bytes(self) -> int:
        """What is on the device."""
        there = (tensor for away in list(self._away.values()) for tensor in away.there)
        return sum(tensor.nbytes for tensor in (*self._images, *there))

    # Masters and moments. On the optimizer thread.

    def adopt(self, updates: Sequence[Update]) -> list[_Away | None]:
        """Blocks until the values are there, because updates there need not be operations of
        torch's."""
        aways = [self._make_room(update) for update in updates]
        made = [away for away in aways if away is not None]
        self._copies.up([pair for away in made for pair in away.pairs()])
        self._away.update((id(away.host[0]), away) for away in made)
        return aways

    def _make_room(self, update: Update) -> _Away | None:
        host = (update.weight, *update.moments)
        if self.is_unwanted or not update.can_move:
            return None
        try:
            with self.work():
                there = tuple(
                    torch.empty(t.shape, dtype=t.dtype, device=self.device.torch_device)
                    for t in host
                )
        except torch.OutOfMemoryError:
            self.is_unwanted = True
            return None
        return _Away(self, host, there)

    def fetch(self, aways: Sequence[_Away]) -> None:
        """Brings their values to the host, where they are used from now on. Under the lock.

        Each is let go of as soon as its value is there. An interrupt in between leaves the others
        held: whoever touches one of them next fetches those.
        """
        # Others are there already, if an interrupt has ended this half-way, and may have been
        # written since.
        held = [
            (away, own, pair)
            for away in aways
            for own, pair in zip(away.host, away.pairs(), strict=True)
            if holder_of(own) is away
        ]

        def is_held(index: int) -> bool:
            away, own, _ = held[index]
            return (
                holder_of(own) is away
            )  # else a signal's handler has looked, and perhaps written, meanwhile

        self._copies.down(
            [pair for _, _, pair in held], is_held, lambda index: free(held[index][1])
        )
        for away in aways:
            self._away.pop(id(away.host[0]), None)

    def fetch_all(self) -> None:
        """Nothing is on the device any more but images. No update may be pending."""
        with self.lock:
            self.fetch(list(self._away.values()))

    # Weights.

    def image_at(self, version: int) -> torch.Tensor | None:
        """What a call at that version computes with; None if that is on the host, also because the
        user wrote there."""
        newest = self._newest  # read once, because the writing back thread replaces it meanwhile
        index = newest.image if version >= newest.since else 1 - newest.image
        return self._images[index] if self._is_valid(index) else None

    def add_image(self) -> None:
        with self.work():
            image = torch.empty(
                self.layer.num_bytes, dtype=torch.uint8, device=self.device.torch_device
            )
        self._stamps.append(
            ()
        )  # first, because a worker may ask for the image as soon as it is there
        self._images.append(image)

    def targets(self, *, aside: bool) -> list[torch.Tensor] | None:
        """Where an update writes the weights: a tensor for each use. None if there is no memory for
        a second image."""
        is_written = self._stamps[self._newest.image] != ()  # else calls read what is on the host
        index = 1 - self._newest.image if aside and is_written else self._newest.image
        if index == len(self._images):
            try:
                self.add_image()
            except torch.OutOfMemoryError:
                self.is_unwanted = True
                return None
        self._written = index
        return [view_of(self._images[index], use) for use in self.layer.uses]

    def turn(self, version: int) -> None:
        """From ``version`` on the weights just written are the newest."""
        self._newest = _Newest(self._written, version)
        self._stamps[self._written] = _stamps(self.layer)
        self.is_home = False
        self._patience = self._patience - 1 if self.was_touched else _PATIENCE
        self.was_touched = False
        self.is_unwanted |= self._patience == 0

    def bring_home(self, version: int) -> bool:
        """Writes the weights at that version into the user's parameters. Blocks; no call may be
        reading those.

        Returns:
            Whether these are the newest.
        """
        image, is_newest = self.image_at(version), version >= self._newest.since
        if image is not None and not (self.is_home and is_newest):
            self._copies.down(
                [Pair(use.parameter.data, view_of(image, use)) for use in self.layer.uses]
            )
        self.is_home = is_newest
        # Because they may be written without a trace now, and calls are to see it.
        self.follow_load()
        return is_newest

    def follow_load(self) -> None:
        """The user's own parameters hold something else now."""
        self._stamps = [() for _ in self._images]

    def _is_valid(self, index: int) -> bool:
        return index < len(self._images) and self._stamps[index] == _stamps(self.layer)


def _stamps(layer: LayerParameters) -> _Stamps:
    return tuple((use.parameter.data_ptr(), use.parameter._version) for use in layer.uses)


def _largest_state(store: ParameterStore) -> int:
    """Bytes of the masters of one layer, of that which has most."""
    return max(sum(4 * use.parameter.numel() for use in layer.uses) for layer in store.layers)


class DeviceStates:
    """All device states, on one device. The optimizer thread takes some, the caller gives them up
    while that is idle.

    Args:
        device: None if there can be none, because several devices would need the same weights.
        memory: where the slices come from that state passes through.
    """

    def __init__(self, store: ParameterStore, device: Device | None, memory: HostMemory) -> None:
        self._store = store
        self._link = (
            None
            if device is None
            else Link(device, PinnedCopier(device.compute, memory, _largest_state(store)))
        )
        self._lock = threading.RLock()
        self._refused: set[int] = set()
        self._most = float("inf")
        self._limit = 0.0

    def of(self, layer: LayerParameters) -> DeviceState | None:
        return self._store.device_states.get(layer.layer)

    def take(
        self, layers: Sequence[LayerParameters], updates: Sequence[Update], gradient_bytes: int
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
        if self._link is None or any(layer.layer in refused for layer in layers):
            return None
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # because the updates are pending, and only looked at
            can_move = all(update.can_move for update in updates)
            state = [
                tensor.nbytes for update in updates for tensor in (update.weight, *update.moments)
            ]
        num_bytes = [2 * layer.num_bytes for layer in layers]
        num_bytes[0] += sum(state) + gradient_bytes
        if not can_move:
            return None
        group = [
            DeviceState(layer, own_bytes, self._link, self._lock)
            for layer, own_bytes in zip(layers, num_bytes, strict=True)
        ]
        with (
            self._lock
        ):  # because a call may be asking for this room: it finds it taken, or this finds it gone
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
            self._store.device_states.update(
                (device_state.layer.layer, device_state) for device_state in group
            )
        return group[0]

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._limit

    @property
    def num_bytes(self) -> int:
        """What they may take."""
        return sum(
            device_state.num_bytes for device_state in list(self._store.device_states.values())
        )

    @property
    def held_bytes(self) -> int:
        """What they take. With no update under way."""
        return sum(device_state.held_bytes for device_state in self._store.device_states.values())

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

    def follow_load(self) -> None:
        """The user's own parameters were changed, after a flush."""
        for device_state in self._store.device_states.values():
            device_state.follow_load()

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
            is_one_unwanted = any(
                device_state.is_unwanted for device_state in self._store.device_states.values()
            )
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
