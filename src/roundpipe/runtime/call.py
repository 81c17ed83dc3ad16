"""One call's shared state: what goes in, what its workers hand each other, what comes out, and
whether it failed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..autoplan.measurements import ShapeMeasurements
from ..device import Device, Event
from ..layers.modes import Modes
from ..layers.saved import Kept
from ..params.gradients import OffloadedLayer
from ..plan.actions import Pass, StageRun
from ..plan.schedule import Schedule
from ..recompute.random_streams import AmbientState, RandomStreams
from ..threads.interrupts import deferred
from ..transfer.boundaries import Boundary, BoundaryGradient
from ..transfer.residency import WeightsVersion

Address = tuple[int, int]  # layer, microbatch
T = TypeVar("T")
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
class Asked:
    """Says what the caller wants of a call.

    ``labels``: one per microbatch. ``only_loss``: of outputs nobody reads more than their loss.
    """

    needs_grad: bool
    loss_fn: LossFn | None
    labels: tuple[Any, ...]
    keeps_outputs: bool
    only_loss: bool
    recompute_grain: str

    @property
    def num_microbatches(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True)
class ModelThen:
    """The model as it was when a call was made, which its late stage runs still see."""

    num_layers: int
    first_trained: int
    weights: WeightsVersion
    modes: Modes
    ambient: AmbientState


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Says what a call keeps where, and who is told what that turned out to take.

    ``saved_layers``: whose inputs a forward keeps; ``spilled_layers``: of those, the ones whose
    wait on the host; ``resident_layers``: what stays on the devices when stage runs are over;
    ``slot_limit``: bytes that slots may take on each device; ``kept_graphs``: the first layers of
    stages whose graphs stay on their device until the backward; ``tokens_at_once``: what row-wise
    modules run for, 0 for all.
    """

    saved_layers: frozenset[int]
    spilled_layers: frozenset[int]
    resident_layers: frozenset[int]
    slot_limit: float
    kept_graphs: frozenset[int]
    measured: ShapeMeasurements
    is_timed: bool
    tokens_at_once: int = 0


class Cancelled(BaseException):
    """Another part of the same call failed first; this part only has to stop. Never reaches the
    user."""


@dataclass(kw_only=True)
class Call:
    """One round through the pipeline, and where its workers meet each other and the caller.

    Written by workers, each its own keys; read by the caller after ``wait_results`` and by the
    optimizer thread after ``wait_finished``. The first error ends it for all. All calls of an
    engine share its condition, so that a failure wakes every wait: whoever changes what another
    thread may wait for notifies it.

    [Note: boundaries] The stage run that has made layer c's input for microbatch m posts it; it is
    kept in ``kept.inputs[c, m]`` if a backward stage run starts at c, and the stage run that
    begins at c posts its gradient.
    """

    asked: Asked
    model: ModelThen
    memory: MemoryPlan
    schedule: Schedule
    streams: RandomStreams
    condition: threading.Condition
    commit: Callable[["Call"], None] | None = None  # makes its gradients count, if it makes any
    kept: Kept = field(default_factory=Kept)
    error: BaseException | None = None
    losses: dict[int, MicrobatchLoss] = field(default_factory=dict)
    outputs: dict[int, Boundary] = field(default_factory=dict)
    offloaded: list[OffloadedLayer] = field(default_factory=list)
    buffer_updates: list[BufferUpdate] = field(default_factory=list)
    attribute_updates: list[AttributeUpdate] = field(default_factory=list)
    # Tensors that forwards have set, which stay on their device.
    lost_attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    input_gradients: dict[int, BoundaryGradient] = field(default_factory=dict)
    is_started: bool = False  # workers have it, or are about to
    reaches_out: bool = False  # a backward has begun that also writes gradients of the caller's own
    _inputs: dict[Address, Boundary] = field(default_factory=dict)
    _gradients: dict[Address, BoundaryGradient] = field(default_factory=dict)
    _offloaded_runs: set[StageRun] = field(default_factory=set)
    _devices_left: int = field(init=False)

    def __post_init__(self) -> None:
        self._devices_left = len(self.schedule.actions)

    def __repr__(self) -> str:
        state = "failed" if self.error else "finished" if self.is_finished else "running"
        losses = f"{len(self.losses)}/{self.asked.num_microbatches} losses"
        return f"<Call: {state}, {losses}, {len(self.offloaded)} layers offloaded>"

    @property
    def is_finished(self) -> bool:
        return self._devices_left == 0

    # What stage runs hand each other.

    def post_input(self, layer: int, microbatch: int, boundary: Boundary) -> None:
        with self.condition:
            self._inputs[layer, microbatch] = boundary
            self.condition.notify_all()

    def take_input(self, layer: int, microbatch: int) -> Boundary:
        """Waits for it. Raises Cancelled once the call has failed."""
        return self._take(self._inputs, (layer, microbatch))

    def post_gradient(self, layer: int, microbatch: int, gradient: BoundaryGradient) -> None:
        """Of what goes into the layer (past the last one: of the output)."""
        with self.condition:
            self._gradients[layer, microbatch] = gradient
            self.condition.notify_all()

    def take_gradient(self, layer: int, microbatch: int) -> BoundaryGradient:
        """Waits for it. Raises Cancelled once the call has failed."""
        return self._take(self._gradients, (layer, microbatch))

    def _take(self, posted: dict[Address, T], key: Address) -> T:
        self.wait_until(lambda: key in posted)
        with self.condition:
            return posted.pop(key)

    # Waiting and failing.

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Waits for a state that some thread announces on the engine's condition. Raises Cancelled
        on failure."""
        with self.condition:
            self.condition.wait_for(lambda: self.error is not None or is_true())
            self.check()

    def is_so(self, is_true: Callable[[], bool]) -> bool:
        """Whether it is true now of a state that is announced on the engine's condition."""
        with self.condition:
            return is_true()

    def check(self) -> None:
        if self.error is not None:
            raise Cancelled

    def fail(self, error: BaseException) -> None:
        """The first error wins; every wait of this call ends."""
        with self.condition:
            if self.error is None:
                self.error = error
            self.condition.notify_all()

    def offload(self, run: StageRun, layers: Sequence[OffloadedLayer]) -> None:
        """The stage run's gradients are on their way down."""
        with self.condition:
            self.offloaded.extend(layers)
            self._offloaded_runs.add(run)
            self.condition.notify_all()

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
        self,
        start: Callable[[], None],
        succeed: Callable[[], None] = lambda: None,
        *,
        advance: bool = True,
    ) -> Iterator[None]:
        """The caller waits inside. Whatever ends that early, an interrupt too, ends the call.

        Args:
            start: hands the call to its workers.
            succeed: what else makes a call count; not run, nor is it committed, if anything has
                failed.
            advance: the caller's generator is one draw on afterwards if a layer drew.
        """
        with deferred(self.fail) as interrupts:
            try:
                start()
                yield
                interrupts.keep()
                if interrupts.error is not None:
                    raise interrupts.error
                self.streams.give_back(advance=advance)
                succeed()
                if self.commit is not None:
                    self.commit(self)
            except BaseException as error:
                interrupts.keep()
                self.fail(error)
                self._drain()
                self.streams.give_back(advance=False)
                raise

    def wait_results(self) -> None:
        """Blocks the caller until every loss (or output) is known. Raises the call's first error,
        after it drained."""
        results = self.losses if self.asked.loss_fn is not None else self.outputs
        self._wait(lambda: len(results) == self.asked.num_microbatches)
        for loss in list(self.losses.values()):
            loss.ready.wait()

    def wait_finished(self) -> None:
        """Blocks until no worker has anything left to do for this call and its gradients are on the
        host."""
        self._wait(lambda: self.is_finished)
        for layer in self.offloaded:
            layer.ready.wait()

    def wait_offloaded(self, layer: int) -> list[OffloadedLayer]:
        """Blocks until all gradients of one layer are on the host, however many stage runs make
        them. Raises the call's first error, after it drained."""
        runs = {
            run
            for run in self.schedule.stage_runs
            if run.pass_ is not Pass.FORWARD and layer in run.layers
        }
        self._wait(lambda: runs <= self._offloaded_runs)
        with self.condition:
            found = [one for one in self.offloaded if one.layer.layer == layer]
        for one in found:
            one.ready.wait()
        return found

    def _wait(self, is_true: Callable[[], bool]) -> None:
        try:
            self.wait_until(is_true)
        except Cancelled:
            pass
        except BaseException as interrupt:
            self.fail(interrupt)
        if self.error is not None:
            self._drain()
            raise self.error

    def _drain(self) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.is_finished or not self.is_started)
        for layer in self.offloaded:
            # Because the memory that gradients are copied to goes with this call.
            layer.ready.wait()
        self._inputs.clear()
        self._gradients.clear()
        self.kept.clear()


def describe(stage_run: StageRun, microbatch: int, layer: str | None, device: str) -> str:
    """Where something happened, for the note on a user's exception."""
    layers = f"layers {stage_run.layers.start}-{stage_run.layers.stop - 1}"
    where = f"{stage_run.pass_.name.lower()} pass, stage {stage_run.stage} ({layers})"
    named = f", layer {layer!r}" if layer is not None else ""
    part = f", microbatch {microbatch}" if microbatch >= 0 else ""
    return f"RoundPipe: {where}{named}{part}, device {device}"
