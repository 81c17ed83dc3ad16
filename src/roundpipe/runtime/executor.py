"""Carries out one device's actions of a call. Decides nothing: the schedule says what, this says
how.

[Note: boundaries] Layer c's input for microbatch m is posted under ("x", c, m) by the stage run
that made it, kept in ``kept.inputs[c, m]`` if a backward stage run starts at c, and its gradient is
posted under ("g", c, m) by that stage run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..device import Device, Event
from ..errors import ConfigError, clear_frames
from ..params.gradient_memory import GradientBuffers
from ..params.gradients import Accumulator, OffloadedLayer, offload
from ..plan.actions import Action, Op, Pass, StageRun
from ..threads.mailbox import Cancelled
from ..trace import spans
from ..transfer.boundaries import (
    Boundary,
    BoundaryGradient,
    boundary_of,
    bring,
    bring_value,
    copied,
)
from ..transfer.spill import Spills
from .autograd import reaches_leaves_beside
from .call import Call, MicrobatchLoss, describe
from .changes import ModuleChanges
from .layer_runner import LayerKnowledge, LayerRunner, detached, tracked
from .loader import StageLoader, Uploads
from .replica_cache import ReplicaCache
from .stage import Stage
from .timing import Stopwatch, Timer, timer_of


class Executor:
    """One device's share of every call.

    Runs on the device's worker thread only. Owns the stages it has uploaded until it releases them;
    boundaries belong to the call.
    """

    def __init__(
        self,
        device: Device,
        loader: StageLoader,
        replicas: ReplicaCache,
        changes: ModuleChanges,
        buffers: GradientBuffers,
        spills: Spills,
        layer_names: Sequence[str],
        knowledge: LayerKnowledge,
        is_written_back: Callable[[int, int], bool],
    ) -> None:
        self.device = device
        self._loader = loader
        self._replicas = replicas
        self._changes = changes
        self._buffers = buffers
        self._spills = spills
        self._watch = Stopwatch()
        self._uploads = Uploads(loader, is_written_back)
        self._layers = LayerRunner(device, replicas, self._uploads, spills, layer_names, knowledge)
        self._stages: dict[StageRun, Stage] = {}
        self._offloading: deque[Event] = deque()  # when the sums of the latest stage runs are down
        self._do = {
            Op.UPLOAD: self._upload,
            Op.FETCH: self._fetch,
            Op.COMPUTE: self._compute,
            Op.OFFLOAD: self._offload,
            Op.RELEASE: self._release,
        }
        self._lanes = {
            Op.UPLOAD: device.up,
            Op.FETCH: device.up,
            Op.COMPUTE: device.compute,
            Op.OFFLOAD: device.down,
        }
        self._passes = {
            Pass.FORWARD: self._forward,
            Pass.FUSED: self._fused,
            Pass.BACKWARD: self._backward,
        }

    def run(self, call: Call, actions: Sequence[Action]) -> None:
        """Does the actions in order. Never raises: the first error of a call goes to its mailbox,
        the rest drains."""
        try:
            stage_runs = [action.stage_run.layers for action in actions if action.op is Op.UPLOAD]
            self._loader.begin_call(stage_runs, call.resident_layers, call.settings.slot_limit)
            self._replicas.begin_call()
            for action in actions:
                call.mailbox.check()
                self._layers.current = None
                try:
                    lane = self._lanes.get(action.op)
                    with spans.span(
                        action.op.name.lower(), lane=lane, action=action, device=self.device.name
                    ):
                        self._do[action.op](call, action)
                except Cancelled:
                    raise
                except BaseException as error:
                    error.add_note(
                        describe(
                            action.stage_run,
                            action.microbatch,
                            self._layers.current,
                            self.device.name,
                        )
                    )
                    if isinstance(error, torch.OutOfMemoryError):
                        clear_frames(
                            error
                        )  # because a notebook keeps it, and the next call needs the memory
                        if call.settings.measured is not None:
                            call.settings.measured.record_shortage()
                    call.mailbox.fail(error)
                    break
        except Cancelled:
            pass
        finally:
            try:
                self._drop_stages()
            except BaseException as error:
                call.mailbox.fail(error)  # a device that has died cannot even be waited for
            finally:
                call.finish_device()

    def close(self) -> None:
        """Frees the device's memory. Called on the worker thread after its last call."""
        self._replicas.forget()
        self._loader.close()
        self.device.trim()

    def _drop_stages(self) -> None:
        if not self._stages:
            return
        self._uploads.give_up()
        for stage in self._stages.values():
            stage.give_up()
        # After a failure nobody may still read working copies, or write to gradient memory that
        # stages let go of.
        for lane in (self.device.up, self.device.compute, self.device.down):
            lane.record().wait()
        for stage in self._stages.values():
            self._let_go(stage)
        self._stages.clear()
        self._replicas.forget()
        self._loader.forget()

    def _upload(self, call: Call, action: Action) -> None:
        settings = call.settings
        timer = timer_of(
            action.stage_run,
            self.device,
            self._watch,
            settings.measured if settings.is_timed else None,
        )
        stage = self._stages[action.stage_run] = self._loader.begin(
            action.stage_run, settings, timer
        )
        self._uploads.begin(call, stage)

    def _fetch(self, call: Call, action: Action) -> None:
        inputs, key = call.kept.inputs, (action.stage_run.layers.start, action.microbatch)
        call.mailbox.wait_until(
            lambda: key in inputs
        )  # because another device may be still to make it
        inputs[key] = self._spills.fetch(inputs[key])

    def _compute(self, call: Call, action: Action) -> None:
        stage, device = self._stages[action.stage_run], self.device
        if (
            action.stage_run.pass_ is not Pass.FORWARD
            and action.microbatch == action.stage_run.microbatches[0]
        ):
            self._wait_offloaded()
        if (
            action.stage_run.pass_ is not Pass.FORWARD
            and action.microbatch == action.stage_run.microbatches[-1]
        ):
            stage.offload_when_complete(partial(self._offload_early, stage))
        with device.compute.work():
            self._passes[action.stage_run.pass_](call, stage, action.microbatch)

    def _offload(self, call: Call, action: Action) -> None:
        stage, share = self._stages[action.stage_run], action.stage_run.microbatches
        for accumulator in reversed(stage.accumulators):
            if accumulator.sums:
                offloaded = accumulator.offloaded or self._offload_layer(stage.timer, accumulator)
                call.offloaded.append(offloaded._replace(first_microbatch=share.start))
        self._offloading.append(self.device.down.record())

    def _wait_offloaded(self) -> None:
        """Before a stage run makes sums. A worker runs ahead of its lanes, and sums are memory in
        use until they are down: those of one stage run may still be on their way."""
        while len(self._offloading) > 1:
            self._offloading.popleft().wait()

    def _offload_early(self, stage: Stage, accumulator: Accumulator) -> OffloadedLayer:
        stage.departures[accumulator.layer.layer].parameters_came()
        return self._offload_layer(stage.timer, accumulator)

    def _offload_layer(self, timer: Timer, accumulator: Accumulator) -> OffloadedLayer:
        stays = self._loader.is_on_device(accumulator.layer)
        return offload(
            accumulator,
            self._buffers,
            self.device,
            partial(timer.copies, "down", self.device.down),
            stays=stays,
        )

    def _release(self, call: Call, action: Action) -> None:
        self._let_go(self._stages.pop(action.stage_run))
        self._watch.read()

    def _let_go(self, stage: Stage) -> None:
        self._replicas.release(stage)
        self._loader.release(stage)

    # The three passes. Each runs one microbatch on the compute lane.

    def _forward(self, call: Call, stage: Stage, microbatch: int) -> None:
        self._spills.begin()
        boundary = self._arrive(call, stage.stage_run.layers.start, microbatch)
        boundary = self._layers.run_forward(
            call, stage, stage.stage_run.layers, microbatch, boundary
        )
        self._note_changes(call, stage, microbatch)
        stop = stage.stage_run.layers.stop
        if stop == call.settings.num_layers and call.settings.loss_fn is not None:
            _, call.losses[microbatch] = self._loss(call, stage, microbatch, boundary.value)
            call.announce()
            return
        boundary = stage.let_go(boundary)._replace(
            source=self.device, ready=self.device.compute.record()
        )
        if stop == call.settings.num_layers:
            call.outputs[microbatch] = boundary
            call.announce()
        else:
            call.mailbox.post(("x", stop, microbatch), boundary)

    def _fused(self, call: Call, stage: Stage, microbatch: int) -> None:
        settings, layers = call.settings, stage.stage_run.layers
        boundary = self._arrive(call, layers.start, microbatch)
        trained = min(max(layers.start, settings.first_trained), layers.stop)
        boundary = self._layers.run_forward(
            call, stage, range(layers.start, trained), microbatch, boundary
        )
        leaves, output = self._layers.run_with_grad(
            call, stage, range(trained, layers.stop), microbatch, boundary
        )
        self._note_changes(call, stage, microbatch)
        if settings.keeps_outputs:
            made = stage.let_go(boundary_of(pytree.tree_map(detached, output), self.device, None))
            call.outputs[microbatch] = made._replace(ready=self.device.compute.record())
        differentiated = range(trained, layers.stop)
        with (
            call.streams.undisturbed(self.device, differentiated, microbatch),
            stage.timer.backward(differentiated, microbatch),
        ):
            ends = [
                leaf.grad_fn for leaf in pytree.tree_leaves(output) if tracked(leaf)
            ]  # before losses write to them
            losses, known = self._loss(call, stage, microbatch, output)
            call.reaches_out |= not settings.only_loss and reaches_leaves_beside(losses, ends)
            torch.autograd.backward([part for part in losses if part.requires_grad] or losses)
        self._post_gradients(call, trained, microbatch, leaves)
        # Announced only now, because a parameter of the caller's own in loss_fn has its gradient
        # only now.
        call.losses[microbatch] = known
        call.announce()

    def _backward(self, call: Call, stage: Stage, microbatch: int) -> None:
        layers = stage.stage_run.layers
        received: BoundaryGradient = call.mailbox.take(("g", layers.stop, microbatch))
        gradients: Sequence[Any] = bring(
            received.leaves, received.source, received.ready, self.device
        )
        boundary = self._spills.restored(call.kept.inputs.pop((layers.start, microbatch)))
        for chunk, start in self._chunks(call, stage, microbatch, boundary):
            leaves, output = self._layers.run_with_grad(
                call, stage, chunk, microbatch, start, again=True
            )
            outputs = pytree.tree_leaves(output)
            flowing = [
                (o, g)
                for o, g in zip(outputs, gradients, strict=True)
                if g is not None and tracked(o)
            ]
            if flowing:
                self._layers.current = None
                with (
                    call.streams.undisturbed(self.device, chunk, microbatch),
                    stage.timer.backward(chunk, microbatch),
                ):
                    torch.autograd.backward([o for o, _ in flowing], [g for _, g in flowing])
            gradients = [leaf.grad if tracked(leaf) else None for leaf in leaves]
            call.kept.forget(chunk, microbatch)
        self._post_gradients(call, layers.start, microbatch, gradients, are_gradients=True)

    def _chunks(
        self, call: Call, stage: Stage, microbatch: int, boundary: Boundary
    ) -> Iterator[tuple[range, Boundary]]:
        """What is recomputed at once, last first: the whole stage, or one layer after a forward
        that keeps inputs."""
        layers = stage.stage_run.layers
        if call.settings.recompute_grain == "stage" or len(layers) == 1:
            yield layers, boundary
            return
        inputs = [boundary]
        for layer in layers[:-1]:
            inputs.append(
                self._layers.run_forward(
                    call,
                    stage,
                    range(layer, layer + 1),
                    microbatch,
                    inputs[-1],
                    again=True,
                    keep=True,
                )
            )
        for layer in reversed(layers):
            yield range(layer, layer + 1), inputs.pop()

    def _note_changes(self, call: Call, stage: Stage, microbatch: int) -> None:
        """Before the results are announced, because the caller writes the buffers as soon as it has
        those."""
        if microbatch == stage.stage_run.microbatches[-1]:
            self._changes.note(call, stage)

    # What goes between layers.

    def _arrive(self, call: Call, layer: int, microbatch: int) -> Boundary:
        boundary: Boundary = call.mailbox.take(("x", layer, microbatch))
        leaves = bring(boundary.leaves, boundary.source, boundary.ready, self.device)
        if boundary.source is None and call.settings.needs_grad:
            # The caller may reuse its own tensors before a late backward reads them again.
            leaves = tuple(map(copied, leaves))
        return boundary._replace(leaves=leaves)

    def _loss(
        self, call: Call, stage: Stage, microbatch: int, output: Any
    ) -> tuple[list[torch.Tensor], MicrobatchLoss]:
        settings = call.settings
        assert settings.loss_fn is not None
        label = bring_value(settings.labels[microbatch], self.device)
        past_last = settings.num_layers
        self._layers.current = "loss_fn"
        with (
            self._layers.entered(call, grad=settings.needs_grad),
            call.streams.layer(self.device, past_last, microbatch),
            self._layers.counted(call, None, past_last, output)
            if settings.needs_grad
            else nullcontext(),
        ):
            loss: Any = settings.loss_fn(output, label)
        self._layers.current = None
        parts: list[Any] = list(loss) if isinstance(loss, (list, tuple)) else [loss]
        for part in parts:
            if not isinstance(part, torch.Tensor):
                raise ConfigError(
                    f"loss_fn returned {type(part).__name__}; it must return a tensor or a "
                    "sequence of them"
                )
        detached = tuple(
            copied(part.detach()) if stage.holds(part) else part.detach() for part in parts
        )
        ready = self.device.compute.record()
        return parts, MicrobatchLoss(detached, isinstance(loss, (list, tuple)), ready)

    def _post_gradients(
        self,
        call: Call,
        layer: int,
        microbatch: int,
        leaves: Sequence[Any],
        *,
        are_gradients: bool = False,
    ) -> None:
        gradients = (
            tuple(leaves)
            if are_gradients
            else tuple(leaf.grad if tracked(leaf) else None for leaf in leaves)
        )
        posted = BoundaryGradient(gradients, self.device, self.device.compute.record())
        if layer == 0:
            call.input_gradients[microbatch] = posted
        elif layer > call.settings.first_trained:
            call.mailbox.post(("g", layer, microbatch), posted)
