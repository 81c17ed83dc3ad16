"""Writes the newest weights where calls read them: computes updates, layer by layer, and says which
version each layer's copies hold. See [Note: versions] and [Note: newest values]."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from math import inf

import torch

from ..params.masters import Masters
from ..params.placement.device_state import DeviceState
from ..params.placement.device_states import DeviceStates
from ..params.placement.newest import Copy, PendingUpdates, Whereabouts, value_of
from ..params.window import GradientWindow
from ..params.working import LayerParameters, ParameterStore, ParameterUse
from ..system.host_memory import SPARED_BYTES, free_host_bytes, resident_bytes
from ..threads.interrupts import SteadyCondition
from ..trace import spans
from .jobs import LateError
from .state_pages import StatePages

# Of working copies, which are written in one call: with adapters, those of many layers.
_TOGETHER_BYTES = 64 << 20
_written_back = operator.attrgetter("written_back")


class WriteBack:
    """Writes working copies on the optimizer thread, or on the caller's while that is idle.

    What keeps it from doing so goes to ``late`` and to the calls that wait for those weights,
    whoever comes first.
    """

    def __init__(
        self,
        condition: SteadyCondition,
        store: ParameterStore,
        masters: Masters,
        device_states: DeviceStates,
        late: LateError,
        pages: StatePages | None = None,
        max_host_bytes: float = inf,
    ) -> None:
        self._max_host_bytes = max_host_bytes
        self._condition = condition
        self._pages = pages
        self._store = store
        self._masters = masters
        self._device_states = device_states
        self._late = late
        self.error: BaseException | None = None  # of the newest attempt, if that failed

    # Which version there is.

    @property
    def version(self) -> int:
        """What every layer holds at least."""
        version: int = min(map(_written_back, self._store.whereabouts))
        return version

    def is_written_back(self, layer: int, version: int) -> bool:
        """Whether the layer's working copies hold ``version``. Called by workers under the engine's
        condition.

        Raises what keeps them from ever holding it.
        """
        if self._store.whereabouts[layer].written_back >= version:
            return True
        if self.error is not None:
            self._late.forget(self.error)  # because the call that waits here delivers it
            raise self.error
        return False

    def note_failure(self, error: BaseException) -> None:
        """What has failed on the optimizer thread, here or elsewhere, is for the next call."""
        self._device_states.note_failure(error)
        if error is not self.error:  # which is late already, or a waiting call has raised it
            self._late.keep(error)

    def advance(self, version: int) -> None:
        """After a failure nothing is written back, yet calls that wait for the version must go
        on."""
        self._mark(range(len(self._store.layers)), version)

    def _mark(self, layers: Iterable[int], version: int) -> None:
        with self._condition:
            for layer in layers:
                whereabouts = self._store.whereabouts[layer]
                whereabouts.written_back = max(whereabouts.written_back, version)
            self._condition.notify_all()

    # What is done to many layers. Shallow ones first where the next forward waits for them.

    def write_back(
        self,
        version: int,
        layers: Sequence[LayerParameters],
        updates: PendingUpdates | None = None,
        window: GradientWindow | None = None,
    ) -> None:
        """No call may be reading weights. Without ``updates`` the user's own parameters are up to
        date afterwards, because somebody may look."""
        try:
            with self._passing(layers, updates):
                for some in self._small_ones_together(layers):
                    with spans.span("write_back", layers=_numbers(some)):
                        self._write(some, version, updates)
                        if updates is None:
                            for layer in some:
                                self._store.whereabouts[layer.layer].bring_home(version)
                    if window is not None:
                        # Before a call that may offload there has all its weights.
                        window.release_layers(some)
                    self._mark(_numbers(some), version)
            self.error = None
        except BaseException as error:
            error.add_note(f"RoundPipe: writing back the weights after step {version}")
            with self._condition:
                self._late.keep(error)
                self.error = error  # for the calls that wait for this version
            raise

    def write_back_behind(self, version: int) -> None:
        """Writes back the layers that do not hold ``version`` yet."""
        whereabouts = self._store.whereabouts
        self.write_back(
            version,
            [
                layer
                for layer in self._store.layers
                if whereabouts[layer.layer].written_back < version
            ],
        )

    def update_aside(self, version: int, updates: PendingUpdates, window: GradientWindow) -> None:
        """While calls still read the version before: layers with one working copy are written back
        by the next step.

        Layers with a device state shallow first, because the call after the next waits for them in
        this order. Then the others, deep first, because gradients of the next call come in this
        order, and find host memory that the update has left.
        """
        there, here = list[LayerParameters](), list[LayerParameters]()
        for layer in self._store.layers:  # shallow ones have a device's room first
            present = self._store.whereabouts[layer.layer].device_state
            is_there = present or self._take_device_state(layer, updates, aside=True)
            (there if is_there else here).append(layer)
        orders = there, here[::-1]
        with self._passing([*chain(*orders)], updates):
            for some in chain(*map(self._small_ones_together, orders)):
                with spans.span("update", layers=_numbers(some)):
                    written_back = self._write(some, version, updates, aside=True)
                window.release_layers(some)
                self._mark(written_back, version)
        if all(whereabouts.second is None for whereabouts in self._store.whereabouts):
            self._make_second_buffers()

    def leave_devices(self, version: int) -> None:
        """Moves to the host what its device has no room for any more. With no update and no call
        under way; calls go on to compute with ``version``."""
        for group in self._device_states.leaving():
            for device_state in group:
                layer = device_state.layer
                whereabouts = self._store.whereabouts[layer.layer]
                if not whereabouts.bring_home(version):
                    self._store.ahead.update(id(use.parameter) for use in layer.uses)
                    with self._condition:
                        whereabouts.written_back = version
            self._device_states.give_up(group)

    def _small_ones_together(
        self, layers: Sequence[LayerParameters]
    ) -> Iterator[list[LayerParameters]]:
        """Neighbours, while they are small together: none waits for the update of a large one
        behind it."""
        some, num_bytes = list[LayerParameters](), 0
        for layer in layers:
            own = sum(use.parameter.nbytes for use in self._ahead(layer))
            if some and num_bytes + own > _TOGETHER_BYTES:
                yield some
                some, num_bytes = [], 0
            some.append(layer)
            num_bytes += own
        if some:
            yield some

    def _make_second_buffers(self) -> None:
        """After an update, when all other memory that a step takes is taken, but for another set of
        gradients."""
        num_bytes = self._store.second_buffer_bytes()
        if not num_bytes or 2 * num_bytes + SPARED_BYTES >= free_host_bytes():
            return
        if self._max_host_bytes == inf or num_bytes < self._max_host_bytes - resident_bytes():
            self._store.make_second_buffers()

    @contextmanager
    def _passing(
        self, layers: Sequence[LayerParameters], updates: PendingUpdates | None
    ) -> Iterator[None]:
        """Inside, state on a disk is read ahead in the order of ``layers``."""
        if self._pages is None:
            yield
            return
        uses = (use for layer in layers for use in self._ahead(layer))
        parameters = dict.fromkeys(id(use.parameter) for use in uses)
        masters = [self._masters.by_parameter[key] for key in parameters]
        pending = [master for master in masters if updates is not None and master in updates]
        self._pages.begin(
            [
                (master, *updates.of(master).moments)
                if updates is not None and master in updates
                else (master,)
                for master in masters
            ],
            for_writing=bool(pending),
        )
        try:
            yield
        finally:
            self._pages.end()

    # What is done to some layers at once, because small updates share their threads.

    def _ahead(self, layer: LayerParameters) -> list[ParameterUse]:
        return [use for use in layer.uses if id(use.parameter) in self._store.ahead]

    def _write(
        self,
        layers: Sequence[LayerParameters],
        version: int,
        updates: PendingUpdates | None,
        *,
        aside: bool = False,
    ) -> list[int]:
        """Computes what is pending and writes masters that are ahead, ``aside`` into idle copies.

        Returns:
            The layers of which a copy holds ``version`` now. The others have no idle copy of what
            is to be written; their masters are updated.
        """
        done: list[int] = []
        targets: dict[int, torch.Tensor | None] = {}
        turned: list[tuple[Whereabouts, Copy]] = []
        for layer in layers:
            whereabouts = self._store.whereabouts[layer.layer]
            device_state = whereabouts.device_state
            if device_state is None and not aside:
                device_state = self._take_device_state(layer, updates, aside=False)
            ahead = [use for use in self._ahead(layer) if targets.get(id(use.parameter)) is None]
            copy = whereabouts.target(ahead, aside=aside) if ahead else None
            if copy is not None and device_state is not None:
                self._write_there(whereabouts, copy, ahead, updates)
                whereabouts.wrote(copy, version)
            elif ahead:
                into = repeat(None) if copy is None else whereabouts.tensors(copy, ahead)
                targets.update(zip((id(use.parameter) for use in ahead), into, strict=False))
                if copy is not None:
                    turned.append((whereabouts, copy))
            if copy is not None or not ahead:
                done.append(layer.layer)
        self._write_here(layers, targets, updates)
        for whereabouts, copy in turned:
            whereabouts.wrote(copy, version)
        return done

    def _write_here(
        self,
        layers: Sequence[LayerParameters],
        targets: dict[int, torch.Tensor | None],
        updates: PendingUpdates | None,
    ) -> None:
        """Masters by the ``id`` of the parameter; where there is no target they are updated
        only."""
        updated, received = [], []
        for key, target in targets.items():
            master = self._masters.by_parameter[key]
            if updates is not None and master in updates:
                updated.append((master, target))
            elif updates is not None and not master.is_owned:
                received.append((master, target))
            elif target is not None:
                if self._pages is not None:
                    self._pages.reach([master])
                target.data.copy_(master.data)
        if updates is not None:
            for some in [updated] if self._pages is None else self._pages.in_calls(updated):
                updates.compute(some)
            self._masters.spread(layers, updates)
        for master, target in received:
            if target is not None:
                target.data.copy_(master.data)
        # Only now, as an interrupt may come before.
        written = (key for key, target in targets.items() if target is not None)
        self._store.ahead.difference_update(written)

    def _write_there(
        self,
        whereabouts: Whereabouts,
        copy: Copy,
        ahead: Sequence[ParameterUse],
        updates: PendingUpdates | None,
    ) -> None:
        device_state, updated = whereabouts.device_state, []
        assert device_state is not None
        with device_state.work(), torch.no_grad():
            for use, target in zip(ahead, whereabouts.tensors(copy, ahead), strict=True):
                master = self._masters.by_parameter[id(use.parameter)]
                if updates is not None and master in updates:
                    updated.append((master, target))
                    continue
                there = value_of(master)
                target.copy_(master.data if there is None else there)
        if updates is not None:
            updates.compute(updated, device_state)
        # A tied weight goes on to be ahead until the last layer that uses it has it.
        last = [use for use in ahead if use == self._store.uses[id(use.parameter)][-1]]
        self._store.ahead.difference_update(id(use.parameter) for use in last)

    def _take_device_state(
        self, layer: LayerParameters, updates: PendingUpdates | None, *, aside: bool
    ) -> DeviceState | None:
        """Taken when an update is to come that makes all of the layer's weights, if there is
        room."""
        if updates is None or not self._device_states.has_room:
            return None
        layers = self._store.tied_with(layer)
        parameters = {id(use.parameter): use.parameter for each in layers for use in each.uses}
        masters = map(self._masters.by_parameter.get, parameters)
        pending = [
            updates.of(master) for master in masters if master is not None and master in updates
        ]
        if len(pending) < len(parameters) or not all(each.num_bytes for each in layers):
            return None
        # Gradients of the next call come while the update still reads these, or where the image
        # would be that is not used.
        return self._device_states.take(
            layers, pending, self._masters.offloaded_bytes(parameters.values()) if aside else 0
        )


def _numbers(layers: Iterable[LayerParameters]) -> list[int]:
    return [layer.layer for layer in layers]
