"""From a batch to its results: a plan, a call of the pipeline, and what the caller gets of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..autoplan.cost_model import first_trained
from ..autoplan.planned import Planned
from ..autoplan.planner import Planner
from ..config import RoundPipeRunConfig
from ..device import MemoryInUse
from ..layers.modes import Modes
from ..layers.saved import Kept
from ..layers.structure import Structure
from ..microbatch.sizes import elements_of, size_class, tokens_of
from ..params.gradient_buffers import GradientBuffers
from ..params.working import ParameterStore
from ..plan.actions import Passes
from ..plan.execute_plan import RunType
from ..plan.kept_layers import with_kept_graphs
from ..plan.schedule import (
    NOWHERE,
    backward_passes,
    forward_passes,
    fused_passes,
    round_robin,
    saved_layers,
)
from ..recompute.random_streams import AmbientState, RandomStreams
from ..recompute.row_wise import can_cut, refuse_uncut
from ..runtime.autograd import Gradients, attach, commits_held
from ..runtime.call import Asked, Call, LossFn, MemoryPlan, ModelThen
from ..runtime.changes import WrittenInShares, refuse_shared_writes, write_buffers
from ..transfer.boundaries import bytes_with_caller, num_bytes, of_all_leaves
from ..transfer.residency import WeightsVersion
from .batches import Batch, Destinations, backward_into, input_gradients, sum_losses
from .device_memory import DeviceMemory, OutOfMemoryBackoff
from .state import Host


@dataclass(frozen=True, kw_only=True)
class Request:
    """Says what a batch is run for.

    Args:
        what: the engine's method, for messages.
        run_type: ``"fused"`` runs backward too, ``"train"`` leaves that to the caller's graph.
        loss_fn: None where outputs are all that is wanted.
        only_loss: of the outputs nobody reads more than their loss.
        is_last: nothing more is to come before the step.
    """

    what: str
    run_type: RunType
    loss_fn: LossFn | None = None
    returns_outputs: bool = True
    only_loss: bool = False
    is_last: bool = False


class Results(NamedTuple):
    """``losses`` are summed, ``outputs`` joined; None where they were not asked for."""

    losses: Any
    outputs: Any


class _Then(NamedTuple):
    """Notes what a backward needs to know of when its forward was over.

    ``targets``: where gradients for what the forward was given go; they are the backward's result.
    ``weights``: which ones it has used. ``memory``: in use on each device.
    """

    targets: Destinations
    weights: tuple[int, int, int]
    memory: list[MemoryInUse]


class BatchRunner:
    """Runs batches through one sequence of layers. Used by the caller's thread. Holds no reference
    to an engine.

    Args:
        name: for messages.
        store: the layers' part of ``host.store``.
        commit: makes the gradients of a backward pass count, which it is called in.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        layers: Sequence[nn.Module],
        store: ParameterStore,
        buffers: GradientBuffers,
        planner: Planner,
        memory: DeviceMemory,
        commit: Callable[[Call], None],
    ) -> None:
        self.name = name
        self.layers = layers
        self.planner = planner
        self.memory = memory
        self._host = host
        self._store = store
        self._commit = commit
        self._structure = Structure(layers)
        self._pool = host.worker_pool
        self.backoff = OutOfMemoryBackoff(name, planner, self._pool.devices)
        self._layer_names = list(map(str, range(len(layers))))
        # Tensors that forwards of the last call have set as attributes of the user's modules.
        self.lost_attributes: list[tuple[nn.Module, str]] = []
        self.executors = self._pool.executors(
            layers, store, host.rules, buffers, host.steps.is_written_back, self._layer_names
        )
        host.steps.update_listeners.append(planner.rates.record_update)

    def name_layers(self, model: nn.Module) -> None:
        """Errors name layers as in ``model``."""
        names = {id(module): name for name, module in model.named_modules()}
        for index, layer in enumerate(self.layers):
            found = (names[id(module)] for module in layer.modules() if names.get(id(module)))
            self._layer_names[index] = next(found, f"{index} ({type(layer).__name__})")

    def forward(
        self, args: Sequence[Any], kwargs: Any, config: RoundPipeRunConfig, only_loss: bool = False
    ) -> Any:
        """The outputs, as parts of the caller's graph if ``config`` wants one."""
        run_type: RunType = "train" if config.builds_graph else "infer"
        # Also where the batch is cut and joined, because the config beats the caller's context.
        with torch.set_grad_enabled(config.builds_graph):
            batch = Batch.cut(args, kwargs, None, len(self._pool.devices) + 1, config)
            request = Request(what="forward()", run_type=run_type, only_loss=only_loss)
            return self.run(batch, request).outputs

    def free_devices(self) -> None:
        """Submits to the workers what frees all that is held for the layers. Returns at once."""
        self._pool.free(self.executors)

    def run(self, batch: Batch, request: Request) -> Results:
        """Makes one call, or more where that helps: see [Note: out of memory]. And once more where
        a forward has written state for the first time, of which shares see nothing: the planner
        knows by now."""
        try:
            return self.backoff.run(request.what, batch, lambda batch: self._run(batch, request))
        except WrittenInShares:
            if batch.config.execute_plan is not None or not batch.can_run_again(self._pool.devices):
                raise
        return self.backoff.run(request.what, batch, lambda batch: self._run(batch, request))

    def _run(self, batch: Batch, request: Request) -> Results:
        call, later = self._prepare(batch, request)
        tensors, is_fused = batch.wanted, request.run_type == "fused"
        losses = joined = None

        def succeed() -> None:
            write_buffers(call)
            self.lost_attributes = call.lost_attributes
            for commit_before in before:
                commit_before()

        with (
            self._host.device_states.noting_failures(),
            batch.spent_by(call),
            commits_held() as before,
            call.awaited(partial(self._pool.start, call, self.executors), succeed),
        ):
            # Meanwhile the planner thinks, because the caller has nothing else to do.
            self.planner.reconsider()
            call.wait_results()
            self.planner.note_writes(bool(call.buffer_updates or call.attribute_updates))
            if not is_fused or call.streams.drawn or tensors:
                call.wait_finished()
            refuse_shared_writes(call)
            if request.loss_fn is not None:
                losses = sum_losses(call)
            if request.returns_outputs:
                outputs = batch.delivered(call)
                self.planner.note_outputs(sum(num_bytes(output.leaves) for output in outputs))
                # Because the call lives until its backward, and they are on devices.
                call.outputs.clear()
                values = [output.value for output in outputs]
                if request.run_type == "train":
                    carries = [output.carries for output in outputs]
                    then = _Then(batch.destinations, self._host.steps.weights, self._in_use())
                    backward = partial(self._run_backward, call, later, carries, then)
                    values = attach(outputs, tensors, backward)
                joined = batch.joined(values, outputs)
            if is_fused and tensors:
                batch.is_spent = True  # because a graph can be gone through once
                backward_into(tensors, input_gradients(call, batch.destinations))
        return Results(losses, joined)

    def _prepare(self, batch: Batch, request: Request) -> tuple[Call, Passes]:
        """A call to start, and the stage runs that will follow it in a call of their own."""
        planned = self._plan(batch, request)
        plan, run_type = planned.plan, request.run_type
        first = first_trained(self._store, wants_gradients=batch.wants_gradients)
        passes = fused_passes(plan, first) if run_type == "fused" else forward_passes(plan.fwd_plan)
        later = backward_passes(plan.bwd_plan, first) if run_type == "train" else []
        planned = self.memory.settle(planned, later)
        if run_type != "infer":
            self._pool.blocks.expect(planned.needs.waiting, is_sure=planned.is_sure)
        kept_graphs, graph_bytes = frozenset[int](), 0
        if batch.config.keep_graphs and later and planned.plan_key.chosen is None:
            at, graph_bytes = self.memory.graphs_kept_from(planned, later)
            passes, later = with_kept_graphs(passes, later, at)
            kept_graphs = frozenset(layers.start for _, layers in later if layers.start >= at)
        rounds = [passes, later] if later else [passes]
        if run_type != "infer":
            self._store.refuse_hooks()
        call = self._call(
            passes,
            Asked(
                needs_grad=run_type != "infer",
                loss_fn=request.loss_fn,
                labels=batch.labels,
                keeps_outputs=request.returns_outputs,
                only_loss=request.only_loss,
                recompute_grain=batch.grain,
            ),
            self._model_now(first),
            MemoryPlan(
                saved_layers=saved_layers([*passes, *later]) - kept_graphs,
                spilled_layers=planned.spilled,
                resident_layers=self.memory.resident_layers(planned, rounds, graph_bytes),
                slot_limit=self.memory.slot_limit(planned),
                kept_graphs=kept_graphs,
                measured=planned.measured,
                is_timed=planned.is_timed,
                tokens_at_once=planned.plan_key.tokens_at_once,
            ),
            RandomStreams(self._pool.devices, enabled=batch.config.preserve_rng_state is not False),
            Kept(),
            self._commit_of(request),
        )
        for microbatch, boundary in enumerate(batch.boundaries):
            call.post_input(0, microbatch, boundary)
        return call, later

    def _commit_of(self, request: Request) -> Callable[[Call], None] | None:
        if request.run_type != "fused":
            return None
        steps = self._host.steps
        return (lambda call: steps.commit(call, early=call)) if request.is_last else steps.commit

    def _model_now(self, first_trained: int) -> ModelThen:
        steps = self._host.steps
        return ModelThen(
            num_layers=len(self._store.layers),
            first_trained=first_trained,
            weights=WeightsVersion(steps.version, steps.num_loads),
            modes=Modes.of(self._structure),
            ambient=AmbientState.of_caller([d.torch_device.type for d in self._pool.devices]),
        )

    def _call(
        self,
        passes: Passes,
        asked: Asked,
        model: ModelThen,
        memory: MemoryPlan,
        streams: RandomStreams,
        kept: Kept,
        commit: Callable[[Call], None] | None,
        placed: Mapping[tuple[range, range], int] = NOWHERE,
    ) -> Call:
        schedule = round_robin(
            passes,
            num_devices=len(self._pool.devices),
            num_microbatches=asked.num_microbatches,
            first_device=self._pool.next_device,
            spilled=memory.spilled_layers,
            placed=placed,
        )
        self._pool.next_device = schedule.next_device
        return Call(
            asked=asked,
            model=model,
            memory=memory,
            schedule=schedule,
            streams=streams,
            condition=self._host.condition,
            kept=kept,
            commit=commit,
        )

    def _plan(self, batch: Batch, request: Request) -> Planned:
        inputs = [boundary.leaves for boundary in batch.boundaries]
        tokens_at_once = batch.config.tokens_at_once
        if tokens_at_once:
            refuse_uncut(self.layers)
        return self.planner.plan(
            request.run_type,
            batch.num_microbatches,
            batch.config.execute_plan,
            shapes=size_class(inputs),
            elements=elements_of(inputs),
            tokens=tokens_of(inputs),
            input_bytes=max(map(num_bytes, inputs)),
            caller_bytes=bytes_with_caller(batch.boundaries),
            wants_gradients=batch.wants_gradients,
            returns=request.returns_outputs,
            grain=batch.grain,
            tokens_at_once=tokens_at_once,
            can_cut=partial(can_cut, self.layers),
        )

    def _run_backward(
        self,
        forward: Call,
        passes: Passes,
        carries: list[tuple[bool, ...]],
        then: _Then,
        gradients: list[Gradients],
    ) -> Gradients:
        """The backward of a forward call: a call of its own, made when the caller's backward comes
        to it, at most once.

        Is given neither what the forward was given nor what it returned, because that is memory of
        the devices. Empties ``gradients``, because a stage run lets go of each as soon as it is
        through with it.

        Args:
            carries: of what the forward returned, per microbatch.
            then: how things were when the forward was over.
        """
        self._host.begin("backward()", self._structure)
        self._host.steps.refuse_other_than(then.weights)
        for after, before in zip(then.memory, self._in_use(), strict=True):
            forward.memory.measured.record_between(after, before)
        forward.streams.take_over()
        call = self._call(
            passes,
            forward.asked,
            forward.model,
            forward.memory,
            forward.streams,
            forward.kept,
            self._commit,
            {
                (run.layers, run.microbatches): run.device
                for run in forward.schedule.stage_runs
                if run.layers.start in forward.memory.kept_graphs
            },
        )
        for microbatch, given in enumerate(gradients):
            posted = of_all_leaves(given, carries[microbatch])
            call.post_gradient(forward.model.num_layers, microbatch, posted)
        gradients.clear()
        with (
            self._host.device_states.noting_failures(),
            call.awaited(partial(self._pool.start, call, self.executors), advance=False),
        ):
            call.wait_finished()
        return input_gradients(call, then.targets)

    def _in_use(self) -> list[MemoryInUse]:
        return [device.memory_in_use() for device in self._pool.devices]
