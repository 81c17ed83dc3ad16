"""Decides which layers have a device state: who takes one, how much memory all of them may have,
and who gives them up. What one is says [Note: device states]."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...device import Device
from ...kernels.updates import RuleUpdate
from ...memory.copier import PinnedCopier
from ...memory.pinning import HostMemory
from ..working import LayerParameters, ParameterStore
from .device_state import DeviceState, Link, state_bytes


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
            most = max(4 * layer.num_elements for layer in store.layers)
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
        """Says whether there can be any."""
        return self._link is not None

    @property
    def has_room(self) -> bool:
        return self.num_bytes < self._limit

    @property
    def num_bytes(self) -> int:
        """They may take so much."""
        return sum(each.num_bytes for each in list(self._store.device_states.values()))

    @property
    def held_bytes(self) -> int:
        """They take so much. With no update under way."""
        return sum(each.held_bytes for each in self._store.device_states.values())

    # Called by the caller's thread.

    def let(self, num_bytes: float, *, is_sure: bool, is_worth_it: bool) -> None:
        """Calls leave so much of the device.

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
