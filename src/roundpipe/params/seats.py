"""Layers that live on a device, optimizer state included, because there is memory to spare.

[Note: seats] A layer with a *seat* has its masters, its moments and its weights on a device. Its gradients land there,
its updates are computed there, and nothing of it goes up or down, so that a model that fits into a device trains as if
it had always been there. On the host everything keeps its place, in optimizers and checkpoints too: the tensors are
held (see [Note: pending updates]), whoever touches one has its newest value fetched first, and the next update takes it
along again.

[1] The weights are an *image* that calls compute with in place of a slot. An asynchronous update writes the idle one of
    two, as in [Note: two working copies]; a synchronous one writes the only one, which no call reads then.
[2] The user's own parameters are brought up to date when somebody may look, by a flush. From then on calls compute with
    those, whatever is written there, until the next update.
[3] All that touches a seat's memory is queued on the compute lane, so its order is the order of queueing: a worker
    computes with a version of a layer only when that is published, and that is said when its update is queued.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from ..device import Device
from .pending import Decided, Update, free, holder_of
from .store import LayerParameters, ParameterStore, view_of

_PATIENCE = 3  # steps in a row between which somebody looked at a layer's state, after which it stays on the host


_Stamps = tuple[tuple[int, int], ...]


class _Newest(NamedTuple):
    """Which image holds the newest version, and since which."""

    image: int
    since: int


class _Away:
    """One master and its moments on the device. Made and passed on by the optimizer thread, settled by any."""

    def __init__(self, seat: "Seat", host: tuple[Any, ...], there: tuple[torch.Tensor, ...]) -> None:
        self.place = seat
        self.there = there
        self._host = host

    def pass_on(self, decided: Decided) -> bool:
        with self.place.lock:  # because another thread may be fetching them
            own = decided.tensors
            are_these = len(own) == len(self._host) and all(a is b for a, b in zip(own, self._host, strict=True))
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
                self.fetch()
                self.place.was_touched = True

    def fetch(self) -> None:
        """Brings the values to the host, where they are used from now on."""
        lane = self.place.device.compute
        # Others are there already, if an interrupt has ended this half-way, and may have been written since.
        away = [(own, there) for own, there in zip(self._host, self.there, strict=True) if holder_of(own) is self]
        with torch._C.DisableTorchFunctionSubclass():
            for own, there in away:
                lane.copy_(own.data, there)
        lane.record().wait()
        for own, _ in away:
            free(own)
        self.place.forget(self._host[0])


def value_of(master: torch.Tensor) -> torch.Tensor | None:
    """A master's newest value, if that is on a device."""
    holder = holder_of(master)
    return holder.there[0] if isinstance(holder, _Away) else None


class Seat:
    """One layer's. ``lock`` is held while tensors change their holder.

    Written by the thread that publishes; workers read images.
    """

    def __init__(self, layer: LayerParameters, num_bytes: int, device: Device, lock: threading.RLock) -> None:
        self.layer = layer
        self.group = [self]  # with those of layers that have weights in common with this one
        self.device = device
        self.lock = lock
        self.num_bytes = num_bytes
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

    def give_up(self) -> None:
        """Nothing of it is on the device any more. Said because seats are part of a circle, the group: what is in here
        would stay until the circle is found."""
        self.fetch_all()
        self._images.clear()
        self._stamps.clear()
        self.group.clear()

    @property
    def held_bytes(self) -> int:
        """What is on the device."""
        there = (tensor for away in list(self._away.values()) for tensor in away.there)
        return sum(tensor.nbytes for tensor in (*self._images, *there))

    # Masters and moments. On the optimizer thread.

    def adopt(self, update: Update) -> _Away | None:
        host = (update.weight, *update.moments)
        if self.is_unwanted or not update.can_move:
            return None
        try:
            with self.work():
                there = tuple(torch.empty(t.shape, dtype=t.dtype, device=self.device.torch_device) for t in host)
        except torch.OutOfMemoryError:
            self.is_unwanted = True
            return None
        for target, own in zip(there, host, strict=True):
            self.device.compute.copy_(target, own.data)
        self.device.compute.record().wait()  # because updates there need not be operations of torch's
        away = self._away[id(update.weight)] = _Away(self, host, there)
        return away

    def forget(self, master: torch.Tensor) -> None:
        self._away.pop(id(master), None)

    def fetch_all(self) -> None:
        """Nothing is on the device any more but images. No update may be pending."""
        with self.lock:
            for away in list(self._away.values()):
                away.fetch()

    # Weights.

    def image_at(self, version: int) -> torch.Tensor | None:
        """What a call at that version computes with; None if that is on the host, also because the user wrote there."""
        newest = self._newest  # read once, because the publishing thread replaces it meanwhile
        index = newest.image if version >= newest.since else 1 - newest.image
        return self._images[index] if self._is_valid(index) else None

    def add_image(self) -> None:
        with self.work():
            image = torch.empty(self.layer.num_bytes, dtype=torch.uint8, device=self.device.torch_device)
        self._stamps.append(())  # first, because a worker may ask for the image as soon as it is there
        self._images.append(image)

    def targets(self, *, aside: bool) -> list[torch.Tensor] | None:
        """Where an update writes the weights: a tensor for each use. None if there is no memory for a second image."""
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
        """Writes the weights at that version into the user's parameters. Blocks; no call may be reading those.

        Returns:
            Whether these are the newest.
        """
        image, is_newest = self.image_at(version), version >= self._newest.since
        if image is not None and not (self.is_home and is_newest):
            for use in self.layer.uses:
                self.device.compute.copy_(use.parameter.data, view_of(image, use))
            self.device.compute.record().wait()
        self.is_home = is_newest
        self.follow_load()  # because they may be written without a trace now, and calls are to see it
        return is_newest

    def follow_load(self) -> None:
        """The user's own parameters hold something else now."""
        self._stamps = [() for _ in self._images]

    def _is_valid(self, index: int) -> bool:
        return index < len(self._images) and self._stamps[index] == _stamps(self.layer)


def _stamps(layer: LayerParameters) -> _Stamps:
    return tuple((use.parameter.data_ptr(), use.parameter._version) for use in layer.uses)


class Seats:
    """All seats, on one device. The optimizer thread takes some, the caller gives them up while that is idle.

    Args:
        device: None if there can be none, because several devices would need the same weights.
    """

    def __init__(self, store: ParameterStore, device: Device | None) -> None:
        self._store = store
        self._device = device
        self._lock = threading.RLock()
        self._refused: set[int] = set()
        self._most = float("inf")
        self._limit = 0.0

    def of(self, layer: LayerParameters) -> Seat | None:
        return self._store.seats.get(layer.layer)

    def take(self, layers: Sequence[LayerParameters], updates: Sequence[Update], gradient_bytes: int) -> Seat | None:
        """Seats for layers whose parameters all have an update to come, if there is room; shallow ones ask first.

        Args:
            layers: one, or all that have weights in common.
            gradient_bytes: of their gradients, if those have no room where the second images would be.

        Returns:
            That of the first.
        """
        refused = self._refused | self._store.written
        if self._device is None or any(layer.layer in refused for layer in layers):
            return None
        with torch._C.DisableTorchFunctionSubclass():  # because the updates are pending, and only looked at
            can_move = all(update.can_move for update in updates)
            state = [tensor.nbytes for update in updates for tensor in (update.weight, *update.moments)]
        num_bytes = [2 * layer.num_bytes for layer in layers]
        num_bytes[0] += sum(state) + gradient_bytes
        if not can_move:
            return None
        group = [Seat(*given, self._device, self._lock) for given in zip(layers, num_bytes, strict=True)]
        with self._lock:  # because a call may be asking for this room: it finds it taken, or this finds it gone
            if self.num_bytes + sum(num_bytes) > self._limit:
                return None
            try:
                for seat in group:
                    seat.add_image()  # of all, because a tied weight is written to all of them or to none
            except torch.OutOfMemoryError:
                self._most = self._limit = self.num_bytes
                return None
            for seat in group:
                seat.group = group
            self._store.seats.update((seat.layer.layer, seat) for seat in group)
        return group[0]

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._limit

    @property
    def num_bytes(self) -> int:
        """What they may take."""
        return sum(seat.num_bytes for seat in list(self._store.seats.values()))

    @property
    def held_bytes(self) -> int:
        """What they take. With no update under way."""
        return sum(seat.held_bytes for seat in self._store.seats.values())

    # Called by the caller's thread.

    def let(self, num_bytes: float, *, is_sure: bool, is_worth_it: bool) -> None:
        """What calls leave of the device.

        Args:
            is_sure: by measurements; the least of such calls counts from then on, so that seats do not come and go.
            is_worth_it: whether more seats would make training faster.
        """
        with self._lock:
            if is_sure:
                self._most = min(self._most, num_bytes)
                self._limit = self._most if is_worth_it else min(self._most, self.num_bytes)
            else:
                self._limit = min(self._limit, num_bytes)

    def follow_load(self) -> None:
        """The user's own parameters were changed, after a flush."""
        for seat in self._store.seats.values():
            seat.follow_load()

    def note_failure(self, error: BaseException) -> None:
        """On any thread. Where the device's memory did not suffice after all, there are to be no seats any more."""
        if isinstance(error, torch.OutOfMemoryError):
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
            is_one_unwanted = any(seat.is_unwanted for seat in self._store.seats.values())
            return is_one_unwanted or self.num_bytes > self._limit

    def leaving(self) -> Iterator[Seat]:
        """Those to be given up now, deepest first. Each is to be before the next is asked for."""
        for index in sorted(self._store.seats, reverse=True):
            seat = self._store.seats.get(index)
            if seat is None:
                continue
            is_unwanted = any(each.is_unwanted for each in seat.group)
            if is_unwanted or self.num_bytes > self._limit:
                self._refused.update(each.layer.layer for each in seat.group if is_unwanted)
                yield from list(seat.group)  # which ends with the first of them

    def give_up(self, seat: Seat) -> None:
        """Its optimizer state is on the host from here on; its weights must be already."""
        seat.give_up()
        del self._store.seats[seat.layer.layer]

    def clear(self) -> None:
        """Gives up all, after a flush."""
        for seat in list(self._store.seats.values()):
            self.give_up(seat)
