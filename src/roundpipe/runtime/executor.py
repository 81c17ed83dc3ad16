"""Carries out one device's actions of a call. Decides nothing: the schedule says what, this says how.

[Note: boundaries] Layer c's input for microbatch m is posted under ("x", c, m) by the visit that made it, kept in
``kept.inputs[c, m]`` if a backward visit starts at c, and its gradient is posted under ("g", c, m) by that visit.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .. import trace
from ..device import Device
from ..errors import ConfigError
from ..memory.blocks import HostBlocks
from ..params.gradients import Accumulator, GradientBuffers, LandedLayer, land
from ..plan.actions import Action, Op, Pass, Visit
from ..plan.measure import GraphBytes
from .board import Cancelled
from .call import Call, MicrobatchLoss, describe
from .recompute_data import LayerRun, running
from .spill import fetch, restored, spill
from .stage import Stage, StageLoader
from .timing import Stopwatch, Timer, timer_of
from .transfer import Boundary, BoundaryGradient, boundary_of, bring, bring_value, copied
from .wanted import wanting


class LayerFacts(NamedTuple):
    """What running a layer once with autograd told: which outputs carry a gradient, whether it writes to its input."""

    carries: tuple[bool, ...]
    writes_input: bool


class LayerKnowledge:
    """Facts by layer and structure of its input, learnt on the first microbatch that shows them. Shared by devices."""

    def __init__(self) -> None:
        self._facts: dict[Any, LayerFacts] = {}

    def get(self, stage: Stage, layer: int, boundary: Boundary) -> LayerFacts | None:
        return self._facts.get(_structure(stage, layer, boundary))

    def put(self, stage: Stage, layer: int, boundary: Boundary, facts: LayerFacts) -> None:
        self._facts[_structure(stage, layer, boundary)] = facts


def _structure(stage: Stage, layer: int, boundary: Boundary) -> Any:
    """What a layer's behaviour may depend on, but for the values of tensors."""
    constants = tuple(leaf for leaf in boundary.leaves if isinstance(leaf, (bool, int, float, str, bytes, type(None))))
    return layer, stage.modes[layer], boundary.spec, boundary.carries, constants


class Executor:
    """One device's share of every call.

    Runs on the device's worker thread only. Owns the stages it has uploaded until it releases them; boundaries belong
    to the call.
    """

    def __init__(
        self,
        device: Device,
        loader: StageLoader,
        buffers: GradientBuffers,
        blocks: HostBlocks,
        layer_names: Sequence[str],
        knowledge: LayerKnowledge,
        is_published: Callable[[int, int], bool],
    ) -> None:
        self.device = device
        self._loader = loader
        self._buffers = buffers
        self._blocks = blocks
        self._watch = Stopwatch()
        self._layer_names = layer_names
        self._knowledge = knowledge
        self._is_published = is_published
        self._stages: dict[Visit, Stage] = {}
        self._layer: str | None = None
        self._do = {
            Op.UPLOAD: self._upload,
            Op.FETCH: self._fetch,
            Op.COMPUTE: self._compute,
            Op.LAND: self._land,
            Op.RELEASE: self._release,
        }
        self._lanes = {
            Op.UPLOAD: device.up,
            Op.FETCH: device.up,
            Op.COMPUTE: device.compute,
            Op.LAND: device.down,
        }
        self._passes = {Pass.FORWARD: self._forward, Pass.FUSED: self._fused, Pass.BACKWARD: self._backward}

    def run(self, call: Call, actions: Sequence[Action]) -> None:
        """Does the actions in order. Never raises: the first error of a call goes to its board, the rest drains."""
        try:
            self._loader.residency.want(call.resident_layers)
            for action in actions:
                call.board.check()
                self._layer = None
                try:
                    lane = self._lanes.get(action.op)
                    with trace.span(action.op.name.lower(), lane=lane, action=action, device=self.device.name):
                        self._do[action.op](call, action)
                except Cancelled:
                    raise
                except BaseException as error:
                    error.add_note(describe(action.visit, action.microbatch, self._layer, self.device.name))
                    call.board.fail(error)
                    break
        except Cancelled:
            pass
        finally:
            try:
                self._drop_stages()
            except BaseException as error:
                call.board.fail(error)  # a device that has died cannot even be waited for
            finally:
                call.finish_device()

    def close(self) -> None:
        """Frees the device's memory. Called on the worker thread after its last call."""
        self._loader.close()
        self.device.trim()

    def _drop_stages(self) -> None:
        if not self._stages:
            return
        for stage in self._stages.values():
            stage.give_up()
        # After a failure nobody may still read working copies, or write to gradient memory that stages let go of.
        for lane in (self.device.up, self.device.compute, self.device.down):
            lane.record().wait()
        for stage in self._stages.values():
            self._loader.release(stage)
        self._stages.clear()
        self._loader.residency.clear()

    def _upload(self, call: Call, action: Action) -> None:
        settings = call.settings
        if settings.replaces_plan and not self._stages:
            self._loader.slots.clear()  # because the other plan may have needed slots that this one has no use for
        timer = timer_of(action.visit, self.device, self._watch, settings.measured if settings.is_timed else None)
        stage = self._stages[action.visit] = Stage(action.visit, settings.modes, settings.weights, timer)
        for layer in action.visit.layers:
            # Layer by layer, because deeper layers may still be being published while these already go up.
            call.board.wait_until(lambda layer=layer: self._is_published(layer, call.settings.weights.version))  # type: ignore[misc]
            self._loader.upload(stage, layer)

    def _fetch(self, call: Call, action: Action) -> None:
        inputs, key = call.kept.inputs, (action.visit.layers.start, action.microbatch)
        call.board.wait_until(lambda: key in inputs)  # because another device may be still to make it
        inputs[key] = fetch(inputs[key], self.device)

    def _compute(self, call: Call, action: Action) -> None:
        stage, device = self._stages[action.visit], self.device
        if action.visit.pass_ is not Pass.FORWARD and action.microbatch == action.visit.microbatches[-1]:
            stage.land_when_complete(partial(self._land_early, stage))
        with device.compute.work():
            self._passes[action.visit.pass_](call, stage, action.microbatch)

    def _land(self, call: Call, action: Action) -> None:
        stage, share = self._stages[action.visit], action.visit.microbatches
        for accumulator in reversed(stage.accumulators.values()):
            if accumulator.sums:
                landed = accumulator.landed or self._land_layer(stage.timer, accumulator)
                call.landed.append(landed._replace(first_microbatch=share.start))

    def _land_early(self, stage: Stage, accumulator: Accumulator) -> LandedLayer:
        stage.departures[accumulator.layer.layer].parameters_came()
        return self._land_layer(stage.timer, accumulator)

    def _land_layer(self, timer: Timer, accumulator: Accumulator) -> LandedLayer:
        return land(accumulator, self._buffers, self.device, partial(timer.copies, "down", self.device.down))

    def _release(self, call: Call, action: Action) -> None:
        self._loader.release(self._stages.pop(action.visit))
        self._watch.read()

    # The three passes. Each runs one microbatch on the compute lane.

    def _forward(self, call: Call, stage: Stage, microbatch: int) -> None:
        boundary = self._arrive(call, stage.visit.layers.start, microbatch)
        boundary = self._run_forward(call, stage, stage.visit.layers, microbatch, boundary)
        self._note_buffers(call, stage, microbatch)
        stop = stage.visit.layers.stop
        if stop == call.settings.num_layers and call.settings.loss_fn is not None:
            _, call.losses[microbatch] = self._loss(call, stage, microbatch, boundary.value)
            call.announce()
            return
        boundary = stage.let_go(boundary)._replace(source=self.device, ready=self.device.compute.record())
        if stop == call.settings.num_layers:
            call.outputs[microbatch] = boundary
            call.announce()
        else:
            call.board.post(("x", stop, microbatch), boundary)

    def _fused(self, call: Call, stage: Stage, microbatch: int) -> None:
        settings, layers = call.settings, stage.visit.layers
        boundary = self._arrive(call, layers.start, microbatch)
        trained = min(max(layers.start, settings.first_trained), layers.stop)
        boundary = self._run_forward(call, stage, range(layers.start, trained), microbatch, boundary)
        leaves, output = self._run_with_grad(call, stage, range(trained, layers.stop), microbatch, boundary)
        self._note_buffers(call, stage, microbatch)
        if settings.keeps_outputs:
            made = stage.let_go(boundary_of(pytree.tree_map(_detached, output), self.device, None))
            call.outputs[microbatch] = made._replace(ready=self.device.compute.record())
        with stage.timer.backward(range(trained, layers.stop), microbatch):
            losses, known = self._loss(call, stage, microbatch, output)
            torch.autograd.backward([part for part in losses if part.requires_grad] or losses)
        self._post_gradients(call, trained, microbatch, leaves)
        # Announced only now, because a parameter of the caller's own in loss_fn has its gradient only now.
        call.losses[microbatch] = known
        call.announce()

    def _backward(self, call: Call, stage: Stage, microbatch: int) -> None:
        layers = stage.visit.layers
        received: BoundaryGradient = call.board.take(("g", layers.stop, microbatch))
        gradients: Sequence[Any] = bring(received.leaves, received.source, received.ready, self.device)
        boundary = restored(call.kept.inputs.pop((layers.start, microbatch)), self.device)
        for chunk, start in self._chunks(call, stage, microbatch, boundary):
            leaves, output = self._run_with_grad(call, stage, chunk, microbatch, start, again=True)
            outputs = pytree.tree_leaves(output)
            flowing = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and _tracked(o)]
            if flowing:
                self._layer = None
                with stage.timer.backward(chunk, microbatch):
                    torch.autograd.backward([o for o, _ in flowing], [g for _, g in flowing])
            gradients = [leaf.grad if _tracked(leaf) else None for leaf in leaves]
            call.kept.forget(chunk, microbatch)
        self._post_gradients(call, layers.start, microbatch, gradients, are_gradients=True)

    def _chunks(
        self, call: Call, stage: Stage, microbatch: int, boundary: Boundary
    ) -> Iterator[tuple[range, Boundary]]:
        """What is recomputed at once, last first: the whole stage, or one layer after a forward that keeps inputs."""
        layers = stage.visit.layers
        if call.settings.recompute_grain == "stage" or len(layers) == 1:
            yield layers, boundary
            return
        inputs = [boundary]
        for layer in layers[:-1]:
            inputs.append(
                self._run_forward(call, stage, range(layer, layer + 1), microbatch, inputs[-1], again=True, keep=True)
            )
        for layer in reversed(layers):
            yield range(layer, layer + 1), inputs.pop()

    def _note_buffers(self, call: Call, stage: Stage, microbatch: int) -> None:
        """Before the results are announced, because the caller writes the buffers as soon as it has those."""
        if microbatch == stage.visit.microbatches[-1]:
            call.buffer_updates.extend(self._loader.buffer_updates(stage))
            call.attribute_updates.extend(self._loader.attribute_updates(stage))

    # Layers and what goes between them.

    def _arrive(self, call: Call, layer: int, microbatch: int) -> Boundary:
        boundary: Boundary = call.board.take(("x", layer, microbatch))
        leaves = bring(boundary.leaves, boundary.source, boundary.ready, self.device)
        if boundary.source is None and call.settings.needs_grad:
            # The caller may reuse its own tensors before a late backward reads them again.
            leaves = tuple(map(copied, leaves))
        return boundary._replace(leaves=leaves)

    def _run_forward(
        self,
        call: Call,
        stage: Stage,
        layers: range,
        microbatch: int,
        boundary: Boundary,
        *,
        again: bool = False,
        keep: bool = False,
    ) -> Boundary:
        """Layers without a graph. Learns, once, which of their outputs would carry a gradient."""
        for layer in layers:
            saves = keep or (not again and layer in call.settings.saved_layers)
            if saves and not again:
                ready = self.device.compute.record()
                kept = stage.let_go(boundary)._replace(source=self.device, ready=ready)
                is_spilled = layer in call.settings.spilled_layers
                call.kept.inputs[layer, microbatch] = spill(kept, self.device, self._blocks) if is_spilled else kept
            facts = self._knowledge.get(stage, layer, boundary) if call.settings.needs_grad else LayerFacts((), False)
            if facts is None:
                boundary = self._learn(call, stage, layer, microbatch, boundary)
                continue
            given = boundary.leaves
            if facts.writes_input and (keep or call.settings.saved_layers):
                given = tuple(map(copied, given))  # because an input kept before may be the same memory
            with self._entered(call, grad=False):
                value = pytree.tree_unflatten(given, boundary.spec)
                output = self._run_layer(call, stage, layer, microbatch, value, again)
            boundary = boundary_of(output, self.device, None, facts.carries)
            if call.settings.needs_grad and len(boundary.carries) != len(boundary.leaves):
                # It returned another structure this time. A gradient that turns out not to flow only costs time.
                boundary = boundary._replace(carries=tuple(map(_is_floating, boundary.leaves)))
        return boundary

    def _learn(self, call: Call, stage: Stage, layer: int, microbatch: int, boundary: Boundary) -> Boundary:
        """Runs a layer with autograd on but keeping nothing for a backward, to see what depends on what."""
        graph = self._graph(stage, layer, boundary.leaves)
        with self._entered(call, grad=True), torch.autograd.graph.saved_tensors_hooks(graph.count, _forgotten):
            flags = zip(boundary.leaves, boundary.carries, strict=True)
            given = [copied(leaf.detach().requires_grad_() if carried else leaf) for leaf, carried in flags]
            versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in given]
            value = pytree.tree_unflatten(given, boundary.spec)
            output = self._run_layer(call, stage, layer, microbatch, value, again=False)
        writes = any(isinstance(t, torch.Tensor) and t._version != v for t, v in zip(given, versions, strict=True))
        carries = tuple(_tracked(leaf) for leaf in pytree.tree_leaves(output))
        if _is_settled(stage.modes[layer], given, boundary.carries, output, carries):
            self._knowledge.put(stage, layer, boundary, LayerFacts(carries, writes))
        self._report(call, layer, graph, boundary.leaves)
        return boundary_of(pytree.tree_map(_detached, output), self.device, None, carries)

    def _run_with_grad(
        self, call: Call, stage: Stage, layers: range, microbatch: int, boundary: Boundary, *, again: bool = False
    ) -> tuple[list[Any], Any]:
        """Layers with a graph. Returns the boundary's leaves, where gradients will appear, and the output."""
        if not layers:
            return [], boundary.value
        facts = self._knowledge.get(stage, layers.start, boundary)
        below = layers.start > call.settings.first_trained or call.settings.first_trained == 0
        carries = [carried and below for carried in boundary.carries]
        with self._entered(call, grad=True):
            flags = zip(boundary.leaves, carries, strict=True)
            leaves = [leaf.detach().requires_grad_() if carried else leaf for leaf, carried in flags]
            # Leaves of the graph are copied because this layer, or a later one handed the same memory, may write to its
            # input; other tensors only unless this layer is known not to.
            writes = facts is None or facts.writes_input
            given = [copied(leaf) if c or writes else leaf for leaf, c in zip(leaves, carries, strict=True)]
            value = pytree.tree_unflatten(given, boundary.spec)
            is_last = microbatch == stage.visit.microbatches[-1]
            for layer in layers:
                if is_last:
                    stage.depart(layer, value, self.device.compute)
                with self._counted(call, stage, layer, value):
                    value = self._run_layer(call, stage, layer, microbatch, value, again)
                stage.timer.made(layer, microbatch, value)
        return leaves, value

    def _run_layer(self, call: Call, stage: Stage, layer: int, microbatch: int, value: Any, again: bool) -> Any:
        self._layer = self._layer_names[layer]
        module = self._loader.module(stage, layer)
        run = self._layer_run(call, stage.visit.pass_, layer, microbatch, again)
        is_kept = not again and call.settings.is_recomputed(stage.visit.pass_, layer)
        if is_kept:
            call.kept.states[layer, microbatch] = self._loader.watch(stage, layer).look()
        elif again:
            self._loader.watch(stage, layer).restore(call.kept.states[layer, microbatch])
        wanted = wanting(only_loss=call.settings.only_loss)
        with (
            call.streams.layer(self.device, layer, microbatch, again=again),
            running(run),
            wanted,
            stage.timer.layer("recompute" if again else "forward", layer, microbatch),
        ):
            if layer == 0:
                args, kwargs = value
                output = module(*args, **kwargs)
            else:
                output = module(value)
        if is_kept:
            self._loader.watch(stage, layer).learn_writes()
        if run is not None and run.saved is not None:
            call.kept.data[layer, microbatch] = boundary_of(run.saved, self.device, self.device.compute.record())
        return output

    def _layer_run(self, call: Call, pass_: Pass, layer: int, microbatch: int, again: bool) -> LayerRun | None:
        if not call.settings.needs_grad:
            return None
        data = call.kept.data.get((layer, microbatch)) if again else None
        if data is None:
            return LayerRun(is_recompute=again, is_kept=call.settings.is_recomputed(pass_, layer))
        leaves = bring(data.leaves, data.source, data.ready, self.device)
        # Copied, because a layer may run again twice, and may write to what it gets.
        return LayerRun(is_recompute=True, recalled=data._replace(leaves=tuple(map(copied, leaves))).value)

    def _loss(
        self, call: Call, stage: Stage, microbatch: int, output: Any
    ) -> tuple[list[torch.Tensor], MicrobatchLoss]:
        settings = call.settings
        assert settings.loss_fn is not None
        label = bring_value(settings.labels[microbatch], self.device)
        past_last = settings.num_layers
        self._layer = "loss_fn"
        with (
            self._entered(call, grad=settings.needs_grad),
            call.streams.layer(self.device, past_last, microbatch),
            self._counted(call, None, past_last, output) if settings.needs_grad else nullcontext(),
        ):
            loss: Any = settings.loss_fn(output, label)
        self._layer = None
        parts: list[Any] = list(loss) if isinstance(loss, (list, tuple)) else [loss]
        for part in parts:
            if not isinstance(part, torch.Tensor):
                raise ConfigError(
                    f"loss_fn returned {type(part).__name__}; it must return a tensor or a sequence of them"
                )
        detached = tuple(copied(part.detach()) if stage.holds(part) else part.detach() for part in parts)
        ready = self.device.compute.record()
        return parts, MicrobatchLoss(detached, isinstance(loss, (list, tuple)), ready)

    @contextmanager
    def _counted(self, call: Call, stage: Stage | None, layer: int, value: Any) -> Iterator[None]:
        """Reports what autograd keeps of a layer (past the last one: of the loss), the first time."""
        if call.settings.measured is None or call.settings.measured.knows_graph(layer):
            yield
            return
        inputs = pytree.tree_leaves(value)
        graph = self._graph(stage, layer, inputs)
        with torch.autograd.graph.saved_tensors_hooks(graph.pack, _detached):
            yield
        self._report(call, layer, graph, inputs)

    def _graph(self, stage: Stage | None, layer: int, inputs: Sequence[Any]) -> GraphBytes:
        parameters = self._loader.module(stage, layer).parameters() if stage is not None else ()
        # The caller's own inputs may be views of a whole batch; they count as the boundary that they are.
        return GraphBytes([*parameters, *(t for t in inputs if layer == 0 and isinstance(t, torch.Tensor))])

    def _report(self, call: Call, layer: int, graph: GraphBytes, inputs: Iterable[Any]) -> None:
        if call.settings.measured is not None:
            call.settings.measured.record_saved_bytes(layer, graph.num_bytes, graph.largest_bytes)
            num_bytes = sum(leaf.nbytes for leaf in inputs if isinstance(leaf, torch.Tensor))
            call.settings.measured.record_input_bytes(layer, num_bytes)

    def _post_gradients(
        self, call: Call, layer: int, microbatch: int, leaves: Sequence[Any], *, are_gradients: bool = False
    ) -> None:
        gradients = tuple(leaves) if are_gradients else tuple(leaf.grad if _tracked(leaf) else None for leaf in leaves)
        posted = BoundaryGradient(gradients, self.device, self.device.compute.record())
        if layer == 0:
            call.input_gradients[microbatch] = posted
        elif layer > call.settings.first_trained:
            call.board.post(("g", layer, microbatch), posted)

    @contextmanager
    def _entered(self, call: Call, *, grad: bool) -> Iterator[None]:
        with call.settings.ambient.entered(self.device.torch_device.type, grad=grad):
            yield


def _is_settled(
    mode: Sequence[bool], given: Sequence[Any], carried: Sequence[bool], output: Any, carries: Sequence[bool]
) -> bool:
    """Whether the layer cannot show another picture next time: something carries a gradient, and what does not has
    only passed through.

    Anything else, though the layer trains or was given a gradient's path, may have been cut off by a branch that
    depends on values.
    """
    has_path = any(mode[1:]) or any(carried)
    passed = {
        leaf.untyped_storage().data_ptr()
        for leaf, is_carried in zip(given, carried, strict=True)
        if isinstance(leaf, torch.Tensor) and not is_carried
    }
    return not has_path or (
        any(carries)
        and all(
            carries_on
            or not isinstance(leaf, torch.Tensor)
            or not leaf.is_floating_point()
            or leaf.untyped_storage().data_ptr() in passed
            for leaf, carries_on in zip(pytree.tree_leaves(output), carries, strict=True)
        )
    )


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _tracked(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _forgotten(nothing: None) -> torch.Tensor:
    raise AssertionError("a graph made only to learn from was run backward")
