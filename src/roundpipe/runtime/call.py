"""One call's shared state: what goes in, what its workers hand each other, what comes out, and
whether it failed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from ..autoplan.measurements import ShapeMeasurements
from ..device import Device, Event
from ..layers.replica import Modes
from ..layers.saved import Kept
from ..params.gradients import OffloadedLayer
from ..plan.actions import Pass, StageRun
from ..plan.schedule import Schedule
from ..recompute.random_streams import AmbientState, RandomStreams
from ..threads.interrupts import deferred
from ..threads.mailbox import Cancelled, Mailbox
from ..transfer.boundaries import Boundary, BoundaryGradient
from ..transfer.residency import WeightsVersion

LossFn = Callable[[Any, Any], torch.Tensor | Sequence[torch.Tensor]]


class MicrobatchLoss(NamedTuple):
    """Detached losses of one microbatch on their device. ``is_sequence``: ``loss_fn`` returned a
    sequence."""

    parts: tuple[torch.Tensor, ...]
    is_sequence: bool
    ready: Event


class BufferUpdate(NamedTuple):
    """A buffer that a forward changed on a device, written to its owner only when the call
    succeeds."""

    owner: nn.Module
    name: str
    value: torch.Tensor | None
    source: Device
    ready: Event


class AttributeUpdate(NamedTuple):
    """A plain attribute that a forward set on its module's replica."""

    module: nn.Module
    name: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class CallSettings:
    """What every stage run of a call needs to know.

    ``slot_limit``: bytes that slots may take on each device.
    """

    num_layers: int
    num_microbatches: int
    needs_grad: bool
    first_trained: int
    saved_layers: frozenset[int]
    recompute_grain: str
    keeps_outputs: bool
    loss_fn: LossFn | None
    labels: tuple[Any, ...]
    weights: WeightsVersion
    ambient: AmbientState
    modes: Modes
    spilled_layers: frozenset[int] = frozenset()
    slot_limit: float = inf
    measured: ShapeMeasurements | None = None
    is_timed: bool = False
    only_loss: bool = False

    def is_recomputed(self, pass_: Pass, layer: int) -> bool:
        """Whether a layer run in that pass runs again before its backward."""
        return pass_ is Pass.FORWARD and layer >= min(self.saved_layers, default=self.num_layers)


@dataclass(kw_only=True)
class Call:
    """One round through the pipeline.

    Written by workers, each its own keys; read by the caller after ``wait_results`` and by the
    optimizer thread after ``wait_finished``. The first error ends it for all.
    """

    settings: CallSettings
    schedule: Schedule
    resident_layers: frozenset[int]
    streams: RandomStreams
    condition: threading.Condition
    kept: Kept
    mailbox: Mailbox = field(init=False)
    losses: dict[int, MicrobatchLoss] = field(default_factory=dict)
    outputs: dict[int, Boundary] = field(default_factory=dict)
    offloaded: list[OffloadedLayer] = field(default_factory=list)
    buffer_updates: list[BufferUpdate] = field(default_factory=list)
    attribute_updates: list[AttributeUpdate] = field(default_factory=list)
    input_gradients: dict[int, BoundaryGradient] = field(default_factory=dict)
    is_started: bool = False  # workers have it, or are about to
    reaches_out: bool = False  # a backward has begun that also writes gradients of the caller's own
    _devices_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(self.condition)
        self._devices_left = len(self.schedule.actions)

    def __repr__(self) -> str:
        s = self.settings
        state = "failed" if self.mailbox.error else "finished" if self.is_finished else "running"
        losses = f"{len(self.losses)}/{s.num_microbatches} losses"
        return f"<Call: {state}, {losses}, {len(self.offloaded)} layers offloaded>"

    @property
    def is_finished(self) -> bool:
        return self._devices_left == 0

    def finish_device(self) -> None:
        """A device's worker has done (or dropped) all its actions and holds nothing of this call
        any more."""
        with self.condition:
            self._devices_left -= 1
            self.condition.notify_all()

    def announce(self) -> None:
        """Something that ``wait_results`` waits for was added."""
        with self.condition:
            self.condition.notify_all()

    @contextmanager
    def awaited(
        self, start: Callable[[], None], commit: Callable[[], None], *, advance: bool = True
    ) -> Iterator[None]:
        """The caller waits inside. Whatever ends that early, an interrupt too, ends the call.

        Args:
            start: hands the call to its workers.
            commit: makes a call that has succeeded count; not run if anything has failed.
            advance: the caller's generator is one draw on afterwards if a layer drew.
        """
        with deferred(self.mailbox.fail) as interrupts:
            try:
                start()
                yield
                interrupts.keep()
                if interrupts.error is not None:
                    raise interrupts.error
                self.streams.give_back(advance=advance)
                commit()
            except BaseException as error:
                interrupts.keep()
                self.mailbox.fail(error)
                self._drain()
                self.streams.give_back(advance=False)
                raise

    def wait_results(self) -> None:
        """Blocks the caller until every loss (or output) is known. Raises the call's first error,
        after it drained."""
        results = self.losses if self.settings.loss_fn is not None else self.outputs
        self._wait(lambda: len(results) == self.settings.num_microbatches)
        for loss in list(self.losses.values()):
            loss.ready.wait()

    def wait_finished(self) -> None:
        """Blocks until no worker has anything left to do for this call and its gradients are on the
        host."""
        self._wait(lambda: self.is_finished)
        for layer in self.offloaded:
            layer.ready.wait()

    def _wait(self, is_true: Callable[[], bool]) -> None:
        try:
            self.mailbox.wait_until(is_true)
        except Cancelled:
            pass
        except BaseException as interrupt:
            self.mailbox.fail(interrupt)
        if self.mailbox.error is not None:
            self._drain()
            raise self.mailbox.error

    def _drain(self) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.is_finished or not self.is_started)
        for layer in self.offloaded:
            # Because the memory that gradients are copied to goes with this call.
            layer.ready.wait()
        self.mailbox.clear()
        self.kept.clear()


def describe(stage_run: StageRun, microbatch: int, layer: str | None, device: str) -> str:
    """Where something happened, for the note on a user's exception."""
    layers = f"layers {stage_run.layers.start}-{stage_run.layers.stop - 1}"
    where = f"{stage_run.pass_.name.lower()} pass, stage {stage_run.stage} ({layers})"
    named = f", layer {layer!r}" if layer is not None else ""
    part = f", microbatch {microbatch}" if microbatch >= 0 else ""
    return f"RoundPipe: {where}{named}{part}, device {device}"
