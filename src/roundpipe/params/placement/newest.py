"""Where the newest value of each parameter is: two state machines, the only ones that know.

[Note: newest values] Of *weights*, one for each layer (`Whereabouts`): in the user's own
parameters, in a second buffer, in an image on a device; or only in its masters, which are ahead. Of
*masters and moments*, one for each master (`Hold`): in their memory, in an update that is decided
but not computed, or on a device. docs/internals/newest-values.md has both as drawings, and says of
each transition which thread makes it and what happens if it raises.

[1] Asynchronous step t runs beside calls that still read W_(t-1), so it writes the idle one of two
    copies, on the host or on the device, which is the newest from then on. The idle one is free:
    it was read only by calls made before step t, and those ended before its job began.
[2] An update is not deferred if its tensors' memory is reachable in another way, a view taken
    earlier for example, or if somebody else may write to its gradient.
[3] Versions are raised when the update is decided, so a graph that saved the old value refuses to
    run backward.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import do_all
from ...kernels.updates import Decision, RuleUpdate, UpdateInto, compute
from .held import Held, free, hold, holder_of, reachable_otherwise, settle

if TYPE_CHECKING:
    from ..working import LayerParameters, ParameterUse
    from .device_state import DeviceState
    from .second_buffer import SecondBuffer


# Weights.


class Copy(IntEnum):
    """One of the places where a layer's weights may lie. Images are on the layer's device."""

    OWN = 0  # the user's own parameters
    SECOND = 1
    IMAGE_0 = 2
    IMAGE_1 = 3


class _Newest(NamedTuple):
    """Versions from ``since`` on are in ``copy``, the one before is in ``before``."""

    copy: Copy
    since: int
    before: Copy


class Whereabouts:
    """Where the newest weights of one layer are, those that calls may read.

    Changed by the thread that writes back, read by workers. ``written_back`` is the version that
    the copies hold at least; touched under the engine's condition.
    """

    def __init__(
        self, layer: "LayerParameters", device_states: "Mapping[int, DeviceState]"
    ) -> None:
        self.second: SecondBuffer | None = None
        self.written_back = 0
        self._layer = layer
        self._device_states = device_states
        self._newest = _Newest(Copy.OWN, 0, Copy.OWN)

    @property
    def device_state(self) -> "DeviceState | None":
        return self._device_states.get(self._layer.layer)

    @property
    def is_home(self) -> bool:
        """Whether the newest copy is the user's own parameters."""
        return self._newest.copy is Copy.OWN

    # What a call at some version reads.

    def _at(self, version: int) -> Copy:
        newest = self._newest  # read once, because the writing thread replaces it meanwhile
        return newest.copy if version >= newest.since else newest.before

    def image_at(self, version: int) -> torch.Tensor | None:
        """The layer on its device; None if that is not what the call reads."""
        copy, device_state = self._at(version), self.device_state
        if device_state is None or copy < Copy.IMAGE_0:
            return None
        return device_state.image(copy - Copy.IMAGE_0)

    def second_at(self, version: int) -> "SecondBuffer | None":
        """The second buffer, if what trains is read there."""
        return self.second if self._at(version) is Copy.SECOND else None

    # Writing.

    def target(self, uses: "Sequence[ParameterUse]", *, aside: bool) -> Copy | None:
        """Where new values of ``uses`` go; None if there is no idle copy of all of them.

        Args:
            aside: calls still read the newest.
        """
        newest, device_state = self._newest.copy, self.device_state
        if device_state is not None:
            is_read = aside and newest >= Copy.IMAGE_0
            index = (newest is Copy.IMAGE_1) ^ is_read
            return Copy(Copy.IMAGE_0 + index) if device_state.has_image(index) else None
        if not aside:
            return Copy.OWN
        if self.second is None or not all(use.place in self.second.tensors for use in uses):
            return None
        return Copy.SECOND if newest is Copy.OWN else Copy.OWN

    def tensors(self, copy: Copy, uses: "Sequence[ParameterUse]") -> list[torch.Tensor]:
        """The parameters in that copy."""
        if copy is Copy.OWN:
            return [use.parameter for use in uses]
        if copy is Copy.SECOND:
            assert self.second is not None
            return [self.second.tensors[use.place] for use in uses]
        assert self.device_state is not None
        return self.device_state.in_image(copy - Copy.IMAGE_0, uses)

    def wrote(self, copy: Copy, version: int) -> None:
        """That copy holds ``version`` now, or will by the time its device has done what is
        queued."""
        if copy >= Copy.IMAGE_0:
            assert self.device_state is not None
            self.device_state.note_written(copy - Copy.IMAGE_0)
        self._newest = _Newest(copy, version, self._newest.copy)

    def bring_home(self, version: int) -> bool:
        """Copies the weights at that version to the user's own parameters, which calls read from
        here on, whatever is written there. Blocks; no call may be reading those.

        Returns:
            Whether these are the newest.
        """
        second, image = self.second_at(version), self.image_at(version)
        is_newest = version >= self._newest.since
        if image is not None:
            assert self.device_state is not None
            self.device_state.bring_home(image)
        elif second is not None:
            for use in self._layer.uses:
                if use.place in second.tensors:
                    use.parameter.data.copy_(second.tensors[use.place])
        self._newest = _Newest(Copy.OWN, version, Copy.OWN)
        return is_newest


# Masters and moments.


class Hold:
    """Holds one master and its moments: by an update that is ``decided`` for them, by their values
    being ``there`` on a device, or both.

    Decided and computed on the optimizer thread; fetched by whoever looks.
    """

    def __init__(self, update: RuleUpdate, decided: "PendingUpdates") -> None:
        self.update: Any = update
        self.decided: PendingUpdates | None = decided
        self.tensors: tuple[Any, ...] = (update.weight, *update.moments)
        self.device_state: DeviceState | None = None
        self.there: tuple[torch.Tensor, ...] = ()

    def decide_again(self, update: RuleUpdate, decided: "PendingUpdates") -> bool:
        """The values stay on the device until this update too is computed there. False if it is
        for other tensors, or another has been decided before, on which it builds.

        Nobody can have a view of the tensors: taking one would have fetched them.
        """
        device_state = self.device_state
        if device_state is None:
            return False
        with device_state.lock:  # because another thread may be fetching them
            own = (update.weight, *update.moments)
            are_these = len(own) == len(self.tensors) and all(
                a is b and holder_of(a) is self for a, b in zip(own, self.tensors, strict=True)
            )
            if are_these and self.decided is None:
                self.update, self.decided = update, decided
                return True
            return False

    def end_update(self) -> None:
        """The update is computed, or never will be."""
        if self.device_state is None:
            for tensor in self.tensors:
                free(tensor)
        self.update = self.decided = None  # of all tensors at once, because somebody may be looking

    def settle(self, tensor: torch.Tensor) -> None:
        decided, device_state = self.decided, self.device_state  # in this order: see `end_update`
        if decided is not None:
            decided.settle(self)
        elif device_state is not None:
            device_state.fetch_for(self, tensor)


def value_of(master: torch.Tensor) -> torch.Tensor | None:
    """A master's newest value, if that is on a device."""
    holder = holder_of(master)
    return holder.there[0] if isinstance(holder, Hold) and holder.there else None


def record(decisions: Sequence[Decision], pending: "PendingUpdates | None") -> None:
    """Each is for the gradient that its master has now. Outside of a ``step_fn``, with nothing
    ``pending``, they are computed at once."""
    updates = [
        RuleUpdate(master, moments, master.offloaded(), master.scale, master.is_gradient_seen, rule)
        for master, moments, rule in decisions
    ]
    if pending is None:
        compute([UpdateInto(update, None) for update in updates])
    else:
        pending.add(updates)


class PendingUpdates:
    """The updates decided in one ``step_fn``. Made, filled and computed by the optimizer thread.

    Args:
        compute: computes updates; together, because many small ones share their threads.
    """

    def __init__(self, compute: Callable[[Sequence[UpdateInto]], None] = compute) -> None:
        self._compute = compute
        self._thread = threading.get_ident()
        self._done = threading.Condition()
        self._decided: dict[int, Hold] = {}  # by the id of the master

    def __contains__(self, master: torch.Tensor) -> bool:
        return id(master) in self._decided

    def of(self, master: torch.Tensor) -> RuleUpdate:
        update: RuleUpdate = self._decided[id(master)].update
        return update

    def add(self, updates: Sequence[RuleUpdate]) -> None:
        """Defers those that nobody can see; computes the others now."""
        others = [update for update in updates if update.seen or not self._decide_again(update)]
        written = [tensor for update in others for tensor in (update.weight, *update.moments)]
        for tensor in [tensor for tensor in written if isinstance(tensor, Held)]:
            settle(tensor)
        torch.autograd.graph.increment_version(
            [t for update in updates for t in (update.weight, *update.moments)]
        )
        visible = reachable_otherwise(written)
        at_once = []
        for update in others:
            own: tuple[Any, ...] = (update.weight, *update.moments)
            if update.seen or (visible and not visible.isdisjoint(map(id, own))):
                at_once.append(UpdateInto(update, None))
                continue
            self._decided[id(update.weight)] = held = Hold(update, self)
            for tensor in own:
                hold(tensor, held)
        if at_once:
            self._compute(at_once)

    def _decide_again(self, update: RuleUpdate) -> bool:
        holder: Any = holder_of(update.weight)
        if holder is None or not holder.decide_again(update, self):
            return False
        self._decided[id(update.weight)] = holder
        return True

    def compute(
        self,
        wanted: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
        device_state: "DeviceState | None" = None,
    ) -> None:
        """Computes the pending updates of some masters, each also into the working copy given with
        it.

        On the device of ``device_state``, if it takes them; and in any case where their newest
        values are. What raises leaves these masters in no defined state; nobody waits for them any
        longer.
        """
        chosen = [(self._decided.pop(id(master)), working) for master, working in wanted]
        if not chosen:
            return
        try:
            with torch._C.DisableTorchFunctionSubclass():  # because only others have to wait
                self._compute_where(chosen, device_state)
        finally:
            with self._done:
                for held, _ in chosen:
                    held.end_update()
                self._done.notify_all()

    def _compute_where(
        self, chosen: Sequence[tuple[Hold, torch.Tensor | None]], device_state: "DeviceState | None"
    ) -> None:
        if device_state is not None:
            device_state.adopt([held for held, _ in chosen if held.device_state is None])
        places: dict[DeviceState | None, list[tuple[Hold, torch.Tensor | None]]] = defaultdict(list)
        for held, working in chosen:
            places[held.device_state].append((held, working))
        do_all(
            partial(self._compute_on, place or device_state, some) for place, some in places.items()
        )

    def _compute_on(
        self, device_state: "DeviceState | None", some: Sequence[tuple[Hold, torch.Tensor | None]]
    ) -> None:
        # The device's work are also gradients that are brought there, because their memory is freed
        # again, and working copies there of which the update is computed on the host.
        with nullcontext() if device_state is None else device_state.work():
            self._compute(
                [
                    UpdateInto(
                        held.update.moved(held.there[0], held.there[1:])
                        if held.there
                        else held.update,
                        working,
                    )
                    for held, working in some
                ]
            )

    def compute_all(self) -> None:
        self.compute([(held.tensors[0], None) for held in self._decided.values()])

    def settle(self, held: Hold) -> None:
        """Returns once the update is computed. Called on whichever thread has touched one of its
        tensors."""
        if threading.get_ident() == self._thread:
            self.compute([(held.tensors[0], None)])
            return
        with self._done:
            self._done.wait_for(lambda: held.decided is not self)
