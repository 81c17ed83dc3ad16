"""Carries out one device's actions of a call. Decides nothing: the schedule says what, this how."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..device import Device, Event
from ..errors import ConfigError, clear_frames
from ..layers.saved import Graph
from ..params.gradient_buffers import GradientBuffers
from ..params.gradients import OffloadedLayer, Offloader
from ..plan.actions import Action, Op, Pass, StageRun
from ..recompute.graph_leaves import leaves_beside
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
from .call import Call, Cancelled, MicrobatchLoss, describe
from .capture.layers import CapturedLayers
from .changes import ModuleChanges
from .layer_runner import LayerKnowledge, LayerRunner, detached, tracked
from .loader import StageLoader, Uploads
from .parked import ParkedStages
from .replica_cache import ReplicaCache
from .stage import MicrobatchRun, Stage
from .timing import Stopwatch, timer_of


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
        captured: CapturedLayers,
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
        self._captured = captured
        self._layers = LayerRunner(
            device, replicas, self._uploads, spills, layer_names, knowledge, captured
        )
        self._stages: dict[StageRun, Stage] = {}
        self._parked = ParkedStages()
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
        """Does the actions in order. Never raises: the first error of a call is noted there, the
        rest drains."""
        try:
            self._parked.drop(self._let_go)
            stage_runs = [action.stage_run for action in actions if action.op is Op.UPLOAD]
            self._loader.begin_call(
                [run.layers for run in stage_runs],
                [run.layers for run in stage_runs if _is_parked(call, run)],
                call.memory.resident_layers,
                call.memory.slot_limit,
            )
            self._replicas.begin_call()
            self._captured.begin_call()
            for action in actions:
                call.check()
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
                        # Because a notebook keeps it, and the next call needs the memory.
                        clear_frames(error)
                        were_any = self._captured.give_up()
                        call.memory.measured.record_shortage(beside_recordings=were_any)
                    call.fail(error)
                    break
        except Cancelled:
            pass
        finally:
            try:
                self._drop_stages()
            except BaseException as error:
                call.fail(error)  # a device that has died cannot even be waited for
            finally:
                call.finish_device()

    def close(self) -> None:
        """Frees the device's memory. Called on the worker thread after its last call."""
        self._parked.drop(self._let_go)
        self._captured.forget()
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
        self._captured.forget()
        self._replicas.forget()
        self._loader.forget()

    def _upload(self, call: Call, action: Action) -> None:
        run, memory = action.stage_run, call.memory
        if _is_parked(call, run):
            self._stages[run] = self._parked.take(call.kept, run)
            return
        timer = timer_of(
            run, self.device, self._watch, memory.measured if memory.is_timed else None
        )
        stage = self._stages[run] = self._loader.begin(
            run,
            call.model,
            timer,
            keeps_graphs=run.layers.start in memory.kept_graphs,
            tokens_at_once=memory.tokens_at_once,
        )
        self._uploads.begin(call, stage)

    def _fetch(self, call: Call, action: Action) -> None:
        inputs, key = call.kept.inputs, (action.stage_run.layers.start, action.microbatch)
        call.wait_until(lambda: key in inputs)  # because another device may be still to make it
        inputs[key] = self._spills.fetch(inputs[key])

    def _compute(self, call: Call, action: Action) -> None:
        stage, pass_ = self._stages[action.stage_run], action.stage_run.pass_
        run = MicrobatchRun.of(call, stage, action.microbatch)
        if pass_ is not Pass.FORWARD:
            if run.is_first:
                self._wait_offloaded()
                self._buffers.expect(self._loader.offloading(stage.stage_run.layers))
            if run.is_last:
                stage.offload_when_complete(self._offloader(stage))
        with self.device.compute.work():
            self._passes[pass_](run)

    def _offload(self, call: Call, action: Action) -> None:
        offloaded: list[OffloadedLayer] = []
        for accumulator in reversed(self._stages[action.stage_run].accumulators):
            accumulator.offload_into(offloaded)
        call.offload(action.stage_run, offloaded)
        self._offloading.append(self.device.down.record())

    def _wait_offloaded(self) -> None:
        """Before a stage run makes sums. A worker runs ahead of its lanes, and sums are memory in
        use until they are down: those of one stage run may still be on their way."""
        while len(self._offloading) > 1:
            self._offloading.popleft().wait()

    def _offloader(self, stage: Stage) -> Offloader:
        departures = stage.departures  # not the stage, which mostly holds this
        return Offloader(
            self.device,
            self._buffers,
            partial(stage.timer.copies, "down", self.device.down),
            self._loader.is_on_device,
            lambda layer: departures[layer.layer].parameters_came(),
            stage.stage_run.microbatches.start,
        )

    def _release(self, call: Call, action: Action) -> None:
        stage = self._stages.pop(action.stage_run)
        if stage.keeps_graphs and action.stage_run.pass_ is Pass.FORWARD:
            self._loader.park(stage)
            self._parked.put(call.kept, stage)
        else:
            self._let_go(stage)
        self._captured.let_inputs_go()
        self._watch.read()

    def _let_go(self, stage: Stage) -> None:
        self._replicas.release(stage)
        self._loader.release(stage)

    # The three passes. Each runs one microbatch on the compute lane.

    def _forward(self, run: MicrobatchRun) -> None:
        self._spills.begin()
        call, layers = run.call, run.stage.stage_run.layers
        boundary = self._arrive(run)
        if run.stage.keeps_graphs:
            boundary = self._forward_keeping(run, boundary)
        else:
            boundary = self._layers.run_forward(run, layers, boundary)
        self._note_changes(run)
        is_end = layers.stop == call.model.num_layers
        if is_end and call.asked.loss_fn is not None:
            _, call.losses[run.microbatch] = self._loss(run, boundary.value)
            call.announce()
            return
        boundary = run.stage.let_go(boundary)._replace(
            source=self.device, ready=self.device.compute.record()
        )
        if is_end:
            call.outputs[run.microbatch] = boundary
            call.announce()
        else:
            call.post_input(layers.stop, run.microbatch, boundary)

    def _forward_keeping(self, run: MicrobatchRun, boundary: Boundary) -> Boundary:
        layers = run.stage.stage_run.layers
        leaves, output = self._layers.run_with_grad(run, layers, boundary)
        run.call.kept.graphs[layers.start, run.microbatch] = Graph(leaves, output)
        carries = tuple(map(tracked, pytree.tree_leaves(output)))
        return boundary_of(pytree.tree_map(detached, output), self.device, None, carries)

    def _fused(self, run: MicrobatchRun) -> None:
        call, stage, layers = run.call, run.stage, run.stage.stage_run.layers
        trained = min(max(layers.start, call.model.first_trained), layers.stop)
        boundary = self._layers.run_forward(run, range(layers.start, trained), self._arrive(run))
        differentiated = range(trained, layers.stop)
        leaves, output = self._layers.run_with_grad(run, differentiated, boundary)
        self._note_changes(run)
        if call.asked.keeps_outputs:
            made = stage.let_go(boundary_of(pytree.tree_map(detached, output), self.device, None))
            call.outputs[run.microbatch] = made._replace(ready=self.device.compute.record())
        with (
            call.streams.undisturbed(self.device, differentiated, run.microbatch),
            stage.timer.backward(differentiated, run.microbatch),
        ):
            # Taken before losses write to them.
            ends = [leaf.grad_fn for leaf in pytree.tree_leaves(output) if tracked(leaf)]
            losses, known = self._loss(run, output)
            beside = iter(()) if call.asked.only_loss else leaves_beside(losses, ends)
            call.reaches_out |= next(beside, None) is not None
            torch.autograd.backward([part for part in losses if part.requires_grad] or losses)
        self._post_gradient(run, trained, _gradients_of(leaves))
        # Announced only now, because a parameter of the caller's own in loss_fn has its gradient
        # only now.
        call.losses[run.microbatch] = known
        call.announce()

    def _backward(self, run: MicrobatchRun) -> None:
        call, stage, layers = run.call, run.stage, run.stage.stage_run.layers
        received = call.take_gradient(layers.stop, run.microbatch)
        gradients = bring(received.leaves, received.source, received.ready, self.device)
        for chunk, (leaves, output) in self._graphs(run):
            outputs = pytree.tree_leaves(output)
            flowing = [
                (o, g)
                for o, g in zip(outputs, gradients, strict=True)
                if g is not None and tracked(o)
            ]
            if flowing:
                self._layers.current = None
                with (
                    call.streams.undisturbed(self.device, chunk, run.microbatch),
                    stage.timer.backward(chunk, run.microbatch),
                ):
                    torch.autograd.backward([o for o, _ in flowing], [g for _, g in flowing])
            gradients = _gradients_of(leaves)
            call.kept.forget(chunk, run.microbatch)
        self._post_gradient(run, layers.start, gradients)

    def _graphs(self, run: MicrobatchRun) -> Iterator[tuple[range, Graph]]:
        """What goes backward at once, last first: kept since the forward, or made again."""
        kept, key = run.call.kept, (run.stage.stage_run.layers.start, run.microbatch)
        if run.stage.keeps_graphs:
            yield run.stage.stage_run.layers, kept.graphs.pop(key)
            return
        boundary = self._spills.restored(kept.inputs.pop(key))
        for chunk, start in self._chunks(run, boundary):
            yield chunk, Graph(*self._layers.run_with_grad(run, chunk, start))

    def _chunks(self, run: MicrobatchRun, boundary: Boundary) -> Iterator[tuple[range, Boundary]]:
        """What is recomputed at once, last first: the whole stage, or one layer after a forward
        that keeps inputs."""
        layers = run.stage.stage_run.layers
        if run.call.asked.recompute_grain == "stage" or len(layers) == 1:
            yield layers, boundary
            return
        inputs = [boundary]
        for layer in layers[:-1]:
            inputs.append(self._layers.run_forward(run, range(layer, layer + 1), inputs[-1]))
        for layer in reversed(layers):
            yield range(layer, layer + 1), inputs.pop()

    def _note_changes(self, run: MicrobatchRun) -> None:
        """Before the results are announced, because the caller writes the buffers as soon as it has
        those."""
        if run.is_last:
            self._changes.note(run.call, run.stage)

    # What goes between layers.

    def _arrive(self, run: MicrobatchRun) -> Boundary:
        boundary = run.call.take_input(run.stage.stage_run.layers.start, run.microbatch)
        leaves = bring(boundary.leaves, boundary.source, boundary.ready, self.device)
        if boundary.source is None and run.call.asked.needs_grad:
            # The caller may reuse its own tensors before a late backward reads them again.
            leaves = tuple(map(copied, leaves))
        return boundary._replace(leaves=leaves)

    def _loss(self, run: MicrobatchRun, output: Any) -> tuple[list[torch.Tensor], MicrobatchLoss]:
        asked, past_last = run.call.asked, run.call.model.num_layers
        assert asked.loss_fn is not None
        label = bring_value(asked.labels[run.microbatch], self.device)
        self._layers.current = "loss_fn"
        with (
            self._layers.entered(run.call, grad=asked.needs_grad),
            run.call.streams.layer(self.device, past_last, run.microbatch),
            self._layers.counted(run, past_last, output) if asked.needs_grad else nullcontext(),
        ):
            loss: Any = asked.loss_fn(output, label)
        self._layers.current = None
        is_sequence = isinstance(loss, (list, tuple))
        parts: list[Any] = list(loss) if is_sequence else [loss]
        for part in parts:
            if not isinstance(part, torch.Tensor):
                raise ConfigError(
                    f"loss_fn returned {type(part).__name__}; it must return a tensor or a "
                    "sequence of them"
                )
        own = tuple(
            copied(part.detach()) if run.stage.holds(part) else part.detach() for part in parts
        )
        return parts, MicrobatchLoss(own, is_sequence, self.device.compute.record())

    def _post_gradient(
        self, run: MicrobatchRun, layer: int, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        posted = BoundaryGradient(tuple(gradients), self.device, self.device.compute.record())
        if layer == 0:
            run.call.input_gradients[run.microbatch] = posted
        elif layer > run.call.model.first_trained:
            run.call.post_gradient(layer, run.microbatch, posted)


def _is_parked(call: Call, run: StageRun) -> bool:
    """Whether the stage has stayed on its device since its forward."""
    return run.pass_ is Pass.BACKWARD and run.layers.start in call.memory.kept_graphs


def _gradients_of(leaves: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    return tuple(leaf.grad if tracked(leaf) else None for leaf in leaves)
