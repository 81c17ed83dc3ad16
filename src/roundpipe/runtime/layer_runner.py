"""Runs a device's layers for one microbatch, with or without a graph, the first time or again."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..autoplan.graph_bytes import GraphBytes
from ..device import Device
from ..errors import ConfigError
from ..layers.output_use import wanting
from ..recompute.own_draws import OwnDraws
from ..recompute.user_data import LayerRun, Running
from ..transfer.boundaries import Boundary, boundary_of, bring, copied
from ..transfer.spill import Spills
from .call import Call
from .capture.layers import CapturedLayers, called
from .loader import Uploads
from .replica_cache import ReplicaCache
from .stage import MicrobatchRun, Stage

_NO_DRAWS = OwnDraws(())


class LayerFacts(NamedTuple):
    """What running a layer once with autograd told: which outputs carry a gradient, whether it
    writes to its input."""

    carries: tuple[bool, ...]
    writes_input: bool


_NO_FACTS = LayerFacts((), False)


class LayerKnowledge:
    """Facts by layer and structure of its input, learnt on the first microbatch that shows them.
    Shared by devices."""

    def __init__(self) -> None:
        self._facts: dict[Any, LayerFacts] = {}

    def get(self, stage: Stage, layer: int, boundary: Boundary) -> LayerFacts | None:
        return self._facts.get(_structure(stage, layer, boundary))

    def put(self, stage: Stage, layer: int, boundary: Boundary, facts: LayerFacts) -> None:
        self._facts[_structure(stage, layer, boundary)] = facts


def _structure(stage: Stage, layer: int, boundary: Boundary) -> Any:
    """What a layer's behaviour may depend on, but for the values of tensors."""
    constants = tuple(
        leaf
        for leaf in boundary.leaves
        if isinstance(leaf, (bool, int, float, str, bytes, type(None)))
    )
    return layer, stage.layer_modes[layer], boundary.spec, boundary.carries, constants


class LayerRunner:
    """Used by the device's worker only, on the compute lane. ``current`` names the layer that runs,
    for errors."""

    def __init__(
        self,
        device: Device,
        replicas: ReplicaCache,
        uploads: Uploads,
        spills: Spills,
        layer_names: Sequence[str],
        knowledge: LayerKnowledge,
        captured: CapturedLayers,
    ) -> None:
        self.current: str | None = None
        self._device = device
        self._replicas = replicas
        self._uploads = uploads
        self._spills = spills
        self._layer_names = layer_names
        self._knowledge = knowledge
        self._captured = captured

    def run_forward(self, run: MicrobatchRun, layers: range, boundary: Boundary) -> Boundary:
        """Layers without a graph. Learns, once, which of their outputs would carry a gradient."""
        if not layers:
            return boundary
        call = run.call
        with self.entered(call, grad=False), wanting(only_loss=call.asked.only_loss):
            for layer in layers:
                boundary = self._run_one_forward(run, layer, boundary)
        return boundary

    def _run_one_forward(self, run: MicrobatchRun, layer: int, boundary: Boundary) -> Boundary:
        call, stage = run.call, run.stage
        if not run.again and layer in call.memory.saved_layers:
            ready = self._device.compute.record()
            kept = stage.let_go(boundary)._replace(source=self._device, ready=ready)
            is_spilled = layer in call.memory.spilled_layers
            call.kept.inputs[layer, run.microbatch] = (
                self._spills.send(kept) if is_spilled else kept
            )
        needs_grad = call.asked.needs_grad
        facts = self._knowledge.get(stage, layer, boundary) if needs_grad else _NO_FACTS
        if facts is None:
            return self._learn(run, layer, boundary)
        given = boundary.leaves
        if facts.writes_input and call.memory.saved_layers:
            given = tuple(map(copied, given))  # because an input kept before may be the same memory
        value = pytree.tree_unflatten(given, boundary.spec)
        boundary = boundary_of(
            self._run_layer(run, layer, value), self._device, None, facts.carries
        )
        if needs_grad and len(boundary.carries) != len(boundary.leaves):
            # It returned another structure this time. A gradient that turns out not to flow only
            # costs time.
            boundary = boundary._replace(carries=tuple(map(_is_floating, boundary.leaves)))
        return boundary

    def _learn(self, run: MicrobatchRun, layer: int, boundary: Boundary) -> Boundary:
        """Runs a layer with autograd on but keeping nothing for a backward, to see what depends on
        what."""
        graph = self._graph(run, layer, boundary.leaves)
        with (
            self.entered(run.call, grad=True),
            torch.autograd.graph.saved_tensors_hooks(graph.count, self._refuse_backward),
        ):
            flags = zip(boundary.leaves, boundary.carries, strict=True)
            given = [
                copied(leaf.detach().requires_grad_() if carried else leaf)
                for leaf, carried in flags
            ]
            versions = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in given]
            output = self._run_layer(run, layer, pytree.tree_unflatten(given, boundary.spec))
        self._check_output(output)
        writes = any(
            isinstance(t, torch.Tensor) and t._version != v
            for t, v in zip(given, versions, strict=True)
        )
        carries = tuple(tracked(leaf) for leaf in pytree.tree_leaves(output))
        mode = run.stage.layer_modes[layer]
        if _is_settled(mode, given, boundary.carries, output, carries):
            self._knowledge.put(run.stage, layer, boundary, LayerFacts(carries, writes))
        _report(run.call, layer, graph, boundary.leaves)
        return boundary_of(pytree.tree_map(detached, output), self._device, None, carries)

    def _refuse_backward(self, nothing: None) -> torch.Tensor:
        raise ConfigError(
            f"layer {self.current} takes gradients in its own forward, whose graph is not kept "
            "where the layer is run again for its backward; give an execute_plan of one stage, "
            "or take them in loss_fn"
        )

    def _check_output(self, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            inside = getattr(leaf, "__dict__", {}) if not isinstance(leaf, torch.Tensor) else {}
            if any(map(tracked, inside.values())):
                raise ConfigError(
                    f"layer {self.current} returned a {type(leaf).__name__} with tensors in it, "
                    "whose gradients cannot be followed from stage to stage; return tensors in "
                    "tuples, lists or dictionaries, or register the class with "
                    "torch.utils._pytree.register_dataclass or register_pytree_node"
                )

    def run_with_grad(
        self, run: MicrobatchRun, layers: range, boundary: Boundary
    ) -> tuple[list[Any], Any]:
        """Layers with a graph. Returns the boundary's leaves, where gradients will appear, and the
        output."""
        if not layers:
            return [], boundary.value
        call, stage = run.call, run.stage
        facts = self._knowledge.get(stage, layers.start, boundary)
        first_trained = call.model.first_trained
        below = layers.start > first_trained or first_trained == 0
        carries = [carried and below for carried in boundary.carries]
        with self.entered(call, grad=True), wanting(only_loss=call.asked.only_loss):
            flags = zip(boundary.leaves, carries, strict=True)
            leaves = [
                leaf.detach().requires_grad_() if carried else leaf for leaf, carried in flags
            ]
            # Leaves of the graph are copied because this layer, or a later one handed the same
            # memory, may write to its input; other tensors only unless this layer is known not to.
            writes = facts is None or facts.writes_input
            given = [
                copied(leaf) if c or writes else leaf
                for leaf, c in zip(leaves, carries, strict=True)
            ]
            value = pytree.tree_unflatten(given, boundary.spec)
            is_last = run.is_last
            for layer in layers:
                if is_last:
                    stage.depart(layer, value, self._device.compute)
                with self.counted(run, layer, value):
                    value = self._run_layer(run, layer, value, with_graph=True)
                stage.timer.made(layer, run.microbatch, value)
        return leaves, value

    def _run_layer(
        self, run: MicrobatchRun, layer: int, value: Any, *, with_graph: bool = False
    ) -> Any:
        call, stage, microbatch, again, first_kept = run
        self.current = self._layer_names[layer]
        module = self._module(run, layer)
        is_kept = layer >= first_kept
        said = self._layer_run(run, layer, is_kept=is_kept)
        draws = _NO_DRAWS
        if is_kept:
            call.kept.states[layer, microbatch] = self._replicas.watch(stage, layer).look()
            draws = stage.replicas[layer].draws()
        elif again:
            self._replicas.watch(stage, layer).restore(call.kept.states[layer, microbatch])
        with (
            call.streams.layer(self._device, layer, microbatch, again=again),
            Running(said),
            stage.timer.layer("recompute" if again else "forward", layer, microbatch),
        ):
            if with_graph:
                output = self._captured.call(run, layer, module, value)
            else:
                output = called(module, value, is_first=layer == 0)
        output = stage.apart(layer, value, output)
        if is_kept:
            self._replicas.watch(stage, layer).learn_writes()
        if said is not None and said.saved is None:
            draws.refuse(self.current)
        elif said is not None:
            call.kept.data[layer, microbatch] = boundary_of(
                said.saved, self._device, self._device.compute.record()
            )
        return output

    def _module(self, run: MicrobatchRun, layer: int) -> nn.Module:
        self._uploads.need(run.call, run.stage, layer)
        return self._replicas.module(run.stage, layer)

    def _layer_run(self, run: MicrobatchRun, layer: int, *, is_kept: bool) -> LayerRun | None:
        if not run.call.asked.needs_grad:
            return None
        data = run.call.kept.data.get((layer, run.microbatch)) if run.again else None
        if data is None:
            return LayerRun(is_recompute=run.again, is_kept=is_kept)
        leaves = bring(data.leaves, data.source, data.ready, self._device)
        # Copied, because a layer may run again twice, and may write to what it gets.
        return LayerRun(
            is_recompute=True, recalled=data._replace(leaves=tuple(map(copied, leaves))).value
        )

    def counted(self, run: MicrobatchRun, layer: int, value: Any) -> AbstractContextManager[None]:
        """Reports what autograd keeps of a layer (past the last one: of the loss), the first
        time."""
        if run.call.memory.measured.knows_graph(layer):
            return nullcontext()
        return self._counting(run, layer, value)

    @contextmanager
    def _counting(self, run: MicrobatchRun, layer: int, value: Any) -> Iterator[None]:
        inputs = pytree.tree_leaves(value)
        graph = self._graph(run, layer, inputs)
        with torch.autograd.graph.saved_tensors_hooks(graph.pack, detached):
            yield
        _report(run.call, layer, graph, inputs)

    def _graph(self, run: MicrobatchRun, layer: int, inputs: Sequence[Any]) -> GraphBytes:
        is_loss = layer == run.call.model.num_layers
        parameters = () if is_loss else self._module(run, layer).parameters()
        # The caller's own inputs may be views of a whole batch; they count as the boundary that
        # they are.
        return GraphBytes(
            [*parameters, *(t for t in inputs if layer == 0 and isinstance(t, torch.Tensor))]
        )

    def entered(self, call: Call, *, grad: bool) -> AbstractContextManager[None]:
        return call.model.ambient.entered(self._device.torch_device.type, grad=grad)


def _report(call: Call, layer: int, graph: GraphBytes, inputs: Iterable[Any]) -> None:
    measured = call.memory.measured
    measured.record_saved_bytes(layer, graph.num_bytes, graph.largest_bytes)
    measured.record_input_bytes(
        layer, sum(leaf.nbytes for leaf in inputs if isinstance(leaf, torch.Tensor))
    )


def _is_settled(
    mode: Sequence[bool],
    given: Sequence[Any],
    carried: Sequence[bool],
    output: Any,
    carries: Sequence[bool],
) -> bool:
    """Whether the layer cannot show another picture next time: something carries a gradient, and
    what does not has only passed through.

    Anything else, though the layer trains or was given a gradient's path, may have been cut off by
    a branch that depends on values.
    """
    has_path = any(mode[1:]) or any(carried)
    passed = {
        leaf.untyped_storage().data_ptr()
        for leaf, is_carried in zip(given, carried, strict=True)
        if _is_strided(leaf) and not is_carried
    }
    return not has_path or (
        any(carries)
        and all(
            carries_on
            or not isinstance(leaf, torch.Tensor)
            or not leaf.is_floating_point()
            or not _is_strided(leaf)
            or leaf.untyped_storage().data_ptr() in passed
            for leaf, carries_on in zip(pytree.tree_leaves(output), carries, strict=True)
        )
    )


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def tracked(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
