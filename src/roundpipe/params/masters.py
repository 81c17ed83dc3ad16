"""The optimizer's own copies: masters are made on first use, follow loaded weights, and are written
back."""

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..memory import huge_pages
from .gradients import GradientRules
from .placement.device_state import DeviceState, DeviceStates, value_of
from .placement.pending import Held, PendingUpdates, hold_as
from .placement.second_buffer import SecondBuffer
from .window import GradientWindow, Offloaded
from .working import LayerParameters, ParameterStore, ParameterUse


class Master(nn.Parameter):
    """A trainable parameter's copy for the optimizer.

    During a step its gradient first is what offloaded, in the offloaded dtype and not yet scaled by
    clipping; RoundPipe's own optimizers read that directly. ``.grad`` in the master's dtype is made
    when somebody else first reads it. Only the optimizer thread sees the gradient: a ``zero_grad``
    of the caller's must not reach into a step under way.
    """

    _offloaded: Offloaded | None = None
    _made: torch.Tensor | None = None
    _thread: int | None = None
    scale: float = 1.0

    def open(self, offloaded: Offloaded | None) -> None:
        """The calling thread's step owns the gradient, if there is one, from here on."""
        self._offloaded, self._made, self.scale, self._thread = (
            offloaded,
            None,
            1.0,
            threading.get_ident(),
        )

    def close(self) -> None:
        self._offloaded = self._made = self._thread = None

    @property
    def is_in_step(self) -> bool:
        """Whether the calling thread runs a step of this master's engine."""
        return self._thread == threading.get_ident()

    @property
    def _is_elsewhere(self) -> bool:
        return self._thread is not None and self._thread != threading.get_ident()

    def offloaded(self) -> tuple[torch.Tensor, ...]:
        """The gradient before ``scale`` is applied, as parts to be added, in whatever dtypes; empty
        if none arrived.

        Valid until the step ends; not to be written.
        """
        if self._offloaded is not None:
            return self._offloaded.parts
        return () if self._made is None else (self._made,)

    @property
    def is_gradient_seen(self) -> bool:
        """Whether ``.grad`` was made or set, so that somebody else may write to it."""
        return self._made is not None

    @property
    def gradient_norms(self) -> torch.Tensor | None:
        """Of ``offloaded`` what `gradients.norms_of` gives, where the device has sent it along."""
        return None if self._offloaded is None else self._offloaded.norms

    @property
    def grad(self) -> torch.Tensor | None:
        if self._is_elsewhere:
            return None
        _refuse_torch_grad_scaler(sys._getframe(1).f_globals.get("__name__", ""))
        if self._offloaded is not None:
            # A copy, because step_fn may keep it while the offloaded memory already serves the next
            # call.
            self._made, self._offloaded = self._offloaded.total().to(self.dtype, copy=True), None
        if self._made is not None and self.scale != 1.0:
            self._made.mul_(self.scale)
        self.scale = 1.0
        return self._made

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if not self._is_elsewhere:
            self._offloaded, self._made, self.scale = None, gradient, 1.0


class HeldMaster(Held, Master):
    """A master that an update is going to write. See [Note: pending updates]."""


hold_as(Master, HeldMaster)


def _refuse_torch_grad_scaler(reader: str) -> None:
    """Its scale may have moved on by now and its skips would come too late. ``reader``: the module
    that reads."""
    if reader.startswith("torch.") and reader.endswith("grad_scaler"):
        raise ConfigError(
            "torch's GradScaler was used in step_fn; use roundpipe.GradScaler, whose scale() goes "
            "into loss_fn, "
            "unscale_() and step() into step_fn, and update() after RoundPipe.step()"
        )


class Masters:
    """One master per trainable parameter, tied weights once.

    Owned by the optimizer thread while a step runs; the caller reads them only in an optimizer
    context, which waits.
    """

    def __init__(
        self, store: ParameterStore, rules: GradientRules, device_states: DeviceStates
    ) -> None:
        self._store = store
        self._rules = rules
        self._device_states = device_states
        self._masters: dict[int, Master] = {}
        self._ids: set[int] = set()  # of the masters themselves
        self._is_ahead: set[int] = set()
        self._writes: dict[
            int, int
        ] = {}  # torch's counts of in-place writes to parameters, when masters last followed

    def of(self, parameter: nn.Parameter) -> Master:
        """The master of a trainable parameter, made from its working copy on first use."""
        master = self._masters.get(id(parameter))
        if master is None:
            dtype = self._rules.master(parameter)
            master = Master(huge_pages.empty(parameter.shape, dtype).copy_(parameter.detach()))
            self._masters[id(parameter)] = master
            self._ids.add(id(master))
            self._store.stepped.add(id(parameter))
            self._writes[id(parameter)] = parameter._version
        return master

    def has_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether there are masters of this engine among them."""
        return not self._ids.isdisjoint(map(id, tensors))

    def existing(self) -> Iterator[tuple[nn.Parameter, Master]]:
        """Pairs of working parameter and master."""
        for parameter in self._store.parameters:
            if id(parameter) in self._masters:
                yield parameter, self._masters[id(parameter)]

    def give_gradients(self, window: GradientWindow) -> None:
        """Opens every master's gradient to the step that begins.

        Raises:
            ConfigError: a gradient arrived for a parameter that no optimizer can have, since it has
                no master yet.
        """
        handed_out = bool(self._masters)
        for parameter in self._store.parameters:
            # Also where it has been frozen since, as an adapter is when another one is set.
            offloaded = window.offloaded(parameter)
            master = self._masters.get(id(parameter))
            if master is None:
                if offloaded is None and not parameter.requires_grad:
                    continue
                if handed_out and offloaded is not None:
                    raise ConfigError(
                        f"parameter {self._store.name_of(parameter)!r} became trainable after the "
                        "optimizer was made "
                        "and would get no update; make the optimizer again over optim_parameters()"
                    )
                master = self.of(parameter)
            master.open(offloaded)

    def take_gradients(self) -> None:
        for _, master in self.existing():
            master.close()

    def mark_ahead(self) -> None:
        """Masters were (or may have been) updated: working copies are behind until written back."""
        self._is_ahead = set(self._masters)

    def write_back(
        self, layers: Iterable[LayerParameters], version: int, pending: PendingUpdates | None = None
    ) -> None:
        """Writes the layers' newest weights into the user's parameters, pending updates in the same
        pass.

        No upload of the user's parameters may be in flight. A layer with a device state has its
        weights written there, and into the user's parameters only if no update is ``pending``: when
        somebody may look.
        """
        targets: dict[int, torch.Tensor] = {}
        turned: list[SecondBuffer] = []
        for layer in layers:
            spare = self._store.spares.get(layer.layer)
            device_state = self._device_state(layer, pending, aside=False)
            if device_state is not None:
                self._write_there(layer, device_state, version, pending, aside=False)
                if pending is None:
                    device_state.bring_home(version)
                    if spare is not None:
                        spare.turn(False, version)
                continue
            ahead = self._ahead(layer)
            if spare is not None and spare.is_newest and not ahead:
                with torch.no_grad():
                    for use in layer.uses:
                        if use.place in spare.tensors:
                            use.parameter.data.copy_(spare.tensors[use.place])
            targets |= {id(use.parameter): use.parameter for use in ahead}
            if spare is not None:
                turned.append(spare)
        self._write(targets, pending)
        for spare in turned:
            spare.turn(False, version)

    def write_back_aside(
        self, layers: Iterable[LayerParameters], version: int, pending: PendingUpdates
    ) -> set[int]:
        """The same, each layer into whichever of two working copies is idle.

        See [Note: two working copies]. Those of a layer with a device state are both on the device.

        Returns:
            The layers that hold ``version`` now. To the others, which have but one working copy of
            what is to be written, nothing was done.
        """
        done: set[int] = set()
        targets: dict[int, torch.Tensor] = {}
        turned: list[tuple[SecondBuffer, bool]] = []
        for layer in layers:
            device_state = self._device_state(layer, pending, aside=True)
            spare = self._store.spares.get(layer.layer)
            ahead = [use for use in self._ahead(layer) if id(use.parameter) not in targets]
            if device_state is not None:
                is_done = self._write_there(layer, device_state, version, pending, aside=True)
            elif spare is None:
                is_done = not ahead  # there is nothing to write
            elif is_done := all(use.place in spare.tensors for use in ahead):
                is_spare = not spare.is_newest
                for use in ahead:
                    targets[id(use.parameter)] = (
                        spare.tensors[use.place] if is_spare else use.parameter
                    )
                turned.append((spare, is_spare))
            if is_done:
                done.add(layer.layer)
        self._write(targets, pending)
        for spare, is_spare in turned:
            spare.turn(is_spare, version)
        return done

    def bytes_ahead(self, layer: LayerParameters) -> int:
        """Of working copies that writing back the layer is to write."""
        return sum(use.parameter.nbytes for use in self._ahead(layer))

    def _ahead(self, layer: LayerParameters) -> list[ParameterUse]:
        return [use for use in layer.uses if id(use.parameter) in self._is_ahead]

    def _write(self, targets: Mapping[int, torch.Tensor], pending: PendingUpdates | None) -> None:
        """Masters that are ahead into working copies, by the ``id`` of the parameter. All updates
        at once, because small ones share their threads."""
        updated = []
        for key, target in targets.items():
            master = self._masters[key]
            if pending is not None and master in pending:
                updated.append((master, target))
            else:
                target.data.copy_(master.data)
        if pending is not None:
            pending.compute(updated)
        self._is_ahead.difference_update(targets)  # only now, as an interrupt may come before

    def _device_state(
        self, layer: LayerParameters, pending: PendingUpdates | None, *, aside: bool
    ) -> DeviceState | None:
        """The layer's device state. Taken when an update is to come that makes all of its weights,
        if there is room."""
        device_state = self._device_states.of(layer)
        if device_state is not None or pending is None or not self._device_states.has_room:
            return device_state
        layers = self._store.tied_with(layer)
        uses = {id(use.parameter): use for each in layers for use in each.uses}
        masters = [self._masters.get(key) for key in uses]
        updates = [
            pending.of(master) for master in masters if master is not None and master in pending
        ]
        is_whole = len(updates) == len(masters) and all(each.num_bytes for each in layers)
        if not is_whole:
            return None
        # Those of the next call come while the update still reads these, or where the image would
        # be that is not used.
        offloaded = (
            self._rules.dtypes(use.parameter).offloaded.itemsize * use.parameter.numel()
            for use in uses.values()
        )
        return self._device_states.take(layers, updates, sum(offloaded) if aside else 0)

    def _write_there(
        self,
        layer: LayerParameters,
        device_state: DeviceState,
        version: int,
        pending: PendingUpdates | None,
        *,
        aside: bool,
    ) -> bool:
        """Masters that are ahead into an image. Nothing, and False, if there is no memory for
        it."""
        ahead = self._ahead(layer)
        if not ahead:
            return True
        updated, targets = [], device_state.targets(aside=aside)
        if targets is None:
            return False
        with device_state.work(), torch.no_grad():
            for use in ahead:
                master, target = self._masters[id(use.parameter)], targets[use.place]
                if pending is not None and master in pending:
                    updated.append((master, target))
                    continue
                there = value_of(master)
                target.copy_(master.data if there is None else there)
        if pending is not None:
            pending.compute(updated, device_state)
        device_state.turn(version)
        # A tied weight goes on to be ahead until the last layer that uses it has it.
        last = [use for use in ahead if use == self._store.uses[id(use.parameter)][-1]]
        self._is_ahead.difference_update(id(use.parameter) for use in last)
        return True

    def update(self, layers: Iterable[LayerParameters], pending: PendingUpdates) -> None:
        """Computes the layers' pending updates and writes back nothing."""
        keys = dict.fromkeys(id(use.parameter) for layer in layers for use in layer.uses)
        masters = [self._masters[key] for key in keys if key in self._masters]
        pending.compute((master, None) for master in masters if master in pending)

    def note_failure(self, error: BaseException) -> None:
        self._device_states.note_failure(error)

    def leave_devices(self, version: int) -> Iterator[int]:
        """Moves to the host what its device has no room for any more. With no update and no call
        under way.

        Yields:
            Layers of which the user's parameters now are at ``version`` and masters ahead of that;
            each as soon as that is so, because what comes after may raise.
        """
        for group in self._device_states.leaving():
            for device_state in group:
                layer = device_state.layer
                spare = self._store.spares.get(layer.layer)
                if (
                    spare is not None and device_state.image_at(version) is not None
                ):  # else it may lie in the spare
                    spare.turn(False, version)
                if not device_state.bring_home(version):
                    self._is_ahead.update(id(use.parameter) for use in layer.uses)
                    yield layer.layer
            self._device_states.give_up(group)

    @property
    def are_ahead(self) -> bool:
        """Whether some update has not been written back."""
        device_states = self._store.device_states.values()
        spares = self._store.spares.values()
        return (
            bool(self._is_ahead)
            or any(spare.is_newest for spare in spares)
            or not all(device_state.is_home for device_state in device_states)
        )

    def follow_load(self, parameter: nn.Parameter, value: torch.Tensor | None) -> None:
        """After a load: the master takes the loaded value at its own precision, if that is where
        the weight came from, else whatever the weight is now, if that is not what the master has
        written back."""
        self._writes[id(parameter)] = parameter._version
        if not parameter.requires_grad and id(parameter) not in self._masters:
            return
        working = parameter.detach()
        is_source = isinstance(value, torch.Tensor) and value.shape == working.shape
        if value is not None and is_source and torch.equal(value.to(working.dtype), working):
            self.of(parameter)  # because only a master can hold what the working dtype rounds away
            self.follow(parameter, value)
            return
        master = self._masters.get(id(parameter))
        if master is not None and not torch.equal(master.detach().to(working.dtype), working):
            self.follow(parameter)

    def follow(self, parameter: nn.Parameter, value: torch.Tensor | None = None) -> None:
        """Makes the master equal to ``value`` (default: the working copy), at the value's
        precision."""
        master = self._masters.get(id(parameter))
        if master is not None:
            with torch.no_grad():
                master.copy_(parameter.data if value is None else value)
            self._is_ahead.discard(id(parameter))

    def follow_others(self) -> None:
        """Another engine has written to the user's parameters, through ``.data``. With nothing
        ahead."""
        self._device_states.follow_load()
        for parameter, _ in self.existing():
            self.follow_load(parameter, None)

    def leave_written(self) -> None:
        """What somebody else has written to the user's parameters in place is not to be overwritten
        by older updates: masters, and second working copies, take it over."""
        for parameter, _ in self.existing():
            if parameter._version == self._writes[id(parameter)]:
                continue
            self._writes[id(parameter)] = parameter._version
            self.follow(parameter)
            home = self._store.uses[id(parameter)][0]
            spare = self._store.spares.get(home.layer)
            if spare is not None and home.place in spare.tensors:
                spare.tensors[home.place].copy_(parameter.data)

    def statistics(self) -> dict[str, Any]:
        return {
            "masters": len(self._masters),
            "master_bytes": sum(master.nbytes for master in self._masters.values()),
            "second_buffer_bytes": sum(spare.image.nbytes for spare in self._store.spares.values()),
            "device_state_bytes": self._device_states.num_bytes,
        }
