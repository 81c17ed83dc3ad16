"""What users touch: a model whose state lives on the host and whose layers run on devices in turn.

[Note: out of memory] A call that fails has no effect, so one that ran out of a device's memory is
made again: the planner has learnt from it (see `ShapeMeasurements.shortages`) and has another plan,
or keeps more inputs on the host. Backward stage runs that run on after their call has returned, and
backward passes of the caller's own graph, cannot be made again, nor can calls that have gone beyond
the engine: whose layers have written to their input where the caller has it, or whose loss has
given parameters of the caller's own their gradients. What fails there is raised.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..autoplan.cost_model import first_trained
from ..autoplan.free_memory import FreeMemory
from ..autoplan.planner import Planned, Planner
from ..config import RoundPipeRunConfig
from ..device import Device
from ..device.choose import DeviceSpec
from ..errors import ConfigError
from ..layers.replica import Modes
from ..layers.structure import Structure
from ..memory.pinning import PinMode
from ..params.gradient_memory import GradientBuffers
from ..params.working import ParameterStore
from ..plan.actions import Passes
from ..plan.costs import LayerCosts, Workload
from ..plan.execute_plan import ModelExecutePlan, RunType
from ..plan.schedule import backward_passes, forward_passes, fused_passes, saved_layers
from ..recompute.random_streams import AmbientState
from ..runtime.autograd import attach, commits_held, when_pass_ends
from ..runtime.call import Call, CallSettings, LossFn
from ..runtime.pipeline import Pipeline
from ..runtime.results import (
    backward_into,
    destinations,
    input_gradients,
    refuse_shared_buffers,
    sum_losses,
    wanted,
    write_buffers,
)
from ..transfer.boundaries import Boundary, bytes_with_caller, num_bytes
from ..transfer.residency import WeightsVersion
from .backward_call import BackwardCall
from .base import Engine, call_site, check_model
from .batches import Batch, GivenMicrobatches, elements_of, outputs_as_loss, size_class, tokens_of
from .forwarding import SignedByModel
from .parts.find import layers_of
from .state import Host, HostSettings

_log = logging.getLogger("roundpipe")
_UNSET = RoundPipeRunConfig()
_MADE_AGAIN = 3  # times at most, see [Note: out of memory]

T = TypeVar("T")


class RoundPipe(Engine):
    """Runs and trains ``model`` with its state in host memory and its layers running on devices in
    turn.

    Args:
        model: an ``nn.Sequential`` (one layer per child) or any module (a single layer), on the
            CPU.
        optim_dtype: dtype of the optimizer's own copies (masters); None means each parameter's
            dtype.
        name: shown in logs, traces and errors; default ``file.py:line`` of the caller.
        model_run_config: settings of every call, below what a call sets itself.
        pin_model: ``"alloc"`` moves weights to page-locked memory, ``"register"`` page-locks them
            in place (clone a slice of one before you copy it to a device yourself), ``"off"``
            leaves them alone (memory-mapped ones in their file) and sends them through a small
            page-locked ring.
        devices: None for every visible accelerator, else one virtual CPU device; an int for
            the first so many accelerators, or that many virtual devices where there are none; or a
            list of devices, such as ``roundpipe.virtual(2)``.
        compile: compile each repeated layer class once with ``torch.compile``.
        grad_dtype: what gradients offload in on the host; None means each parameter's dtype.
        max_gpu_memory: what the engine keeps under on each device, as ``"24GB"``, ``"900MiB"`` or a
            number of GB; a virtual device has no more.
        process_group: not supported; anything but None is refused.

    Raises:
        ConfigError: a bad setting, a model without parameters, or weights that cannot be staged.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with RoundPipe(model, devices=2) as engine:
        ...     optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        ...     x, y = torch.randn(8, 4), torch.randn(8, 1)
        ...     loss = engine.forward_backward(
        ...         (x,), label=y, loss_fn=lambda out, y: ((out - y) ** 2).sum() / 8
        ...     )
        ...     handle = engine.step(optimizer.step, is_async=False)
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig = _UNSET,
        pin_model: PinMode = "alloc",
        *,
        devices: DeviceSpec = None,
        compile: bool = False,
        grad_dtype: torch.dtype | None = None,
        max_gpu_memory: str | float | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        check_model(model)
        settings = HostSettings.of(
            process_group=process_group,
            optim_dtype=optim_dtype,
            pin_model=pin_model,
            devices=devices,
            compile=compile,
            grad_dtype=grad_dtype,
            max_gpu_memory=max_gpu_memory,
        )
        host = Host(layers_of(model), settings.choose_devices(), settings)
        self._take(name if name is not None else call_site(), host)
        self._set_up(model, model_run_config, host.buffers)
        self._seal()

    def _set_up(
        self,
        model: nn.Module,
        config: RoundPipeRunConfig,
        buffers: GradientBuffers,
        *,
        keeps_layers: bool = True,
    ) -> None:
        """Readies the pipeline for the layers of ``model``, which are those of ``_store``.
        ``keeps_layers``: see `Planner`."""
        self._config = config
        self._hold(sequence=model)
        layers, host = layers_of(model), self._host
        self._layer_structure = Structure(layers)
        self._pipeline = Pipeline(
            layers,
            host.worker_pool,
            self._store,
            host.rules,
            buffers,
            host.condition,
            self._steps.is_written_back,
        )
        self._planner = Planner(
            self._store,
            host.worker_pool.devices,
            layers=layers,
            rules=host.rules,
            held_bytes=host.device_bytes,
            keeps_layers=keeps_layers,
        )
        self._free_memory = FreeMemory(self._planner, self._store, host.device_states)
        host.steps.update_listeners.append(self._planner.rates.record_update)
        self.set_original_model(model)

    def set_original_model(self, model: nn.Module) -> None:
        """Names parameters as in ``model`` and forwards attributes to it; its parameters must be
        the layers' own.

        Raises:
            ConfigError: some parameter of ``model`` is in no layer.
        """
        self._look_at(model)
        self._name_layers(model)

    def _name_layers(self, model: nn.Module) -> None:
        """Errors name layers as in ``model``."""
        names = {id(module): name for name, module in model.named_modules()}
        for index, layer in enumerate(layers_of(self.__dict__["_sequence"])):
            found = (names[id(module)] for module in layer.modules() if names.get(id(module)))
            self._pipeline.layer_names[index] = next(found, f"{index} ({type(layer).__name__})")

    def __repr__(self) -> str:
        if self._is_closed:
            return f"RoundPipe({self._name}, closed)"
        devices = ", ".join(device.name for device in self._pipeline.devices)
        return (
            f"RoundPipe({self._name}, {len(self._store.layers)} layers on {devices}, "
            f"{self._steps!r})"
        )

    # Running.

    @SignedByModel
    def forward(
        self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = _UNSET, **kwargs: Any
    ) -> Any:
        """Splits the inputs, runs the pipeline and merges the outputs.

        Without grad, pending updates are flushed first. With grad the outputs support
        ``backward()``; that raises RuntimeError if ``step`` ran in between.
        """
        self._begin("forward()")
        config = roundpipe_run_config.over(self._config)
        with_grad = (
            torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad
        )
        if not with_grad:
            self._use_newest_weights()
        batch = Batch.cut(args, kwargs, None, self.default_num_microbatch, config)
        return self._made_again(
            "forward()", batch, lambda: self._forward(batch, with_grad=with_grad)
        )

    def _forward(self, batch: Batch, *, with_grad: bool) -> Any:
        planned = self._plan("train" if with_grad else "infer", batch, returns=True)
        plan = planned.plan
        if with_grad:
            refuse_hooks(self._store)
        backward = backward_passes(plan.bwd_plan, self._first_trained(batch)) if with_grad else []
        settings = self._settings(
            batch, planned, needs_grad=with_grad, saved_layers=saved_layers(backward)
        )
        call = self._run(planned, forward_passes(plan.fwd_plan), settings, batch, backward=backward)
        with (
            self._host.device_states.noting_failures(),
            call.awaited(lambda: self._pipeline.start(call), lambda: write_buffers(call)),
        ):
            self._wait_results(call)
            call.wait_finished()
            refuse_shared_buffers(call)
            outputs = batch.delivered(call)
            self._planner.note_outputs(sum(num_bytes(output.leaves) for output in outputs))
            # Because the call lives until its backward, and they are on devices.
            call.outputs.clear()
            if with_grad:
                workload = self._backward_round(call, backward, batch, outputs)
                values = attach(outputs, wanted(batch.boundaries), workload)
            else:
                values = [output.value for output in outputs]
            result = batch.joined(values, outputs)
        return result

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | None = None,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = _UNSET,
        *,
        microbatches: GivenMicrobatches | None = None,
    ) -> Any:
        """Runs every microbatch forward, through ``loss_fn(outputs, label)``, and backward.

        Args:
            input_args, input_kwargs: what the first layer is called with, whole; or
            microbatches: ``(args, kwargs, label)`` for each microbatch, already split.
            loss_fn: called once per microbatch on a worker thread; default: the outputs are the
                loss. Once more if the call is made again because a device was out of memory.

        Returns:
            The **sum** of the microbatches' losses, a detached CPU tensor (a list if ``loss_fn``
            returns a sequence); with ``return_outputs`` a pair of that and the merged outputs.
            Returns once these are known: remaining backward stage runs run on, and what fails there
            is raised by the next call.
        """
        self._begin("forward_backward()")
        config = run_config.over(self._config)
        batch = Batch.of(
            input_args, input_kwargs, label, microbatches, self.default_num_microbatch, config
        )
        call = partial(
            self._forward_backward, batch, loss_fn or outputs_as_loss, return_outputs=return_outputs
        )
        return self._made_again("forward_backward()", batch, call)

    def _forward_backward(self, batch: Batch, loss_fn: LossFn, *, return_outputs: bool) -> Any:
        planned = self._plan("fused", batch, returns=return_outputs)
        refuse_hooks(self._store)
        passes = fused_passes(planned.plan, self._first_trained(batch))
        settings = self._settings(
            batch,
            planned,
            needs_grad=True,
            saved_layers=saved_layers(passes),
            loss_fn=loss_fn,
            keeps_outputs=return_outputs,
        )
        call = self._run(planned, passes, settings, batch)
        tensors = wanted(batch.boundaries)

        def commit() -> None:
            write_buffers(call)
            for commit_before in before:
                commit_before()
            self._steps.commit(call)

        with (
            self._host.device_states.noting_failures(),
            batch.spent_by(call),
            commits_held() as before,
            call.awaited(lambda: self._pipeline.start(call), commit),
        ):
            self._wait_results(call)
            if call.streams.drawn or tensors:
                call.wait_finished()
            refuse_shared_buffers(call)
            result = loss = sum_losses(call)
            if return_outputs:
                outputs = batch.delivered(call)
                self._planner.note_outputs(sum(num_bytes(output.leaves) for output in outputs))
                result = loss, batch.joined([output.value for output in outputs], outputs)
            if tensors:
                batch.is_spent = True  # because a graph can be gone through once
                backward_into(tensors, input_gradients(call, destinations(batch.boundaries)))
        return result

    def forward_loss(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | None = None,
        run_config: RoundPipeRunConfig = _UNSET,
        *,
        microbatches: GivenMicrobatches | None = None,
    ) -> Any:
        """The losses of ``forward_backward`` without its backward, at the newest weights: for
        evaluation.

        Outputs stay on their device and are dropped after ``loss_fn``. Takes and returns what
        ``forward_backward`` does.
        """
        self._begin("forward_loss()")
        self._steps.flush()
        config = run_config.over(self._config)
        batch = Batch.of(
            input_args, input_kwargs, label, microbatches, self.default_num_microbatch, config
        )
        call = partial(self._forward_loss, batch, loss_fn or outputs_as_loss)
        return self._made_again("forward_loss()", batch, call)

    def _forward_loss(self, batch: Batch, loss_fn: LossFn) -> Any:
        planned = self._plan("infer", batch)
        settings = self._settings(
            batch, planned, needs_grad=False, saved_layers=frozenset(), loss_fn=loss_fn
        )
        call = self._run(planned, forward_passes(planned.plan.fwd_plan), settings, batch)
        with (
            self._host.device_states.noting_failures(),
            call.awaited(lambda: self._pipeline.start(call), lambda: write_buffers(call)),
        ):
            self._wait_results(call)
            call.wait_finished()
            refuse_shared_buffers(call)
            losses = sum_losses(call)
        return losses

    def _made_again(self, what: str, batch: Batch, call: Callable[[], T]) -> T:
        """See [Note: out of memory]."""
        left = _MADE_AGAIN
        while True:
            shortages = self._planner.shortages
            try:
                return call()
            except torch.OutOfMemoryError as error:
                is_ours = (
                    self._planner.shortages > shortages
                )  # else it is not a device of this engine's that is full
                if not left or not is_ours or not batch.can_run_again(self._pipeline.devices):
                    raise
                left -= 1
                _log.warning(
                    "%s: %s is made again with less on its devices, because of: %s",
                    self._name,
                    what,
                    error,
                )

    def _first_trained(self, batch: Batch) -> int:
        return first_trained(self._store, wants_gradients=batch.wants_gradients)

    def _settings(
        self,
        batch: Batch,
        planned: Planned,
        *,
        needs_grad: bool,
        saved_layers: frozenset[int],
        loss_fn: LossFn | None = None,
        keeps_outputs: bool = False,
    ) -> CallSettings:
        return CallSettings(
            num_layers=len(self._store.layers),
            num_microbatches=batch.num_microbatches,
            needs_grad=needs_grad,
            first_trained=self._first_trained(batch),
            saved_layers=saved_layers,
            recompute_grain=batch.grain,
            keeps_outputs=keeps_outputs,
            loss_fn=loss_fn,
            labels=batch.labels,
            weights=WeightsVersion(self._steps.version, self._steps.num_loads),
            ambient=AmbientState.of_caller(
                {device.torch_device.type for device in self._pipeline.devices}
            ),
            modes=Modes.of(self._layer_structure),
            spilled_layers=planned.spilled,
            slot_limit=self._free_memory.slot_limit(planned),
            measured=planned.measured,
            is_timed=planned.is_timed,
            only_loss=loss_fn is outputs_as_loss and not keeps_outputs,
        )

    def _plan(self, run_type: RunType, batch: Batch, *, returns: bool = False) -> Planned:
        inputs = [boundary.leaves for boundary in batch.boundaries]
        planned = self._planner.plan(
            run_type,
            batch.num_microbatches,
            batch.config.execute_plan,
            shapes=size_class(inputs),
            elements=elements_of(inputs),
            tokens=tokens_of(inputs),
            input_bytes=max(map(num_bytes, inputs)),
            caller_bytes=bytes_with_caller(batch.boundaries),
            wants_gradients=batch.wants_gradients,
            returns=returns,
            grain=batch.grain,
        )
        self._make_room(planned)
        return planned

    def _wait_results(self, call: Call) -> None:
        """Waits for losses or outputs. Meanwhile the planner thinks, because the caller has nothing
        else to do."""
        self._planner.reconsider()
        call.wait_results()
        self._planner.note_writes(bool(call.buffer_updates or call.attribute_updates))

    def _run(
        self,
        planned: Planned,
        passes: Passes,
        settings: CallSettings,
        batch: Batch,
        *,
        backward: Passes | None = None,
    ) -> Call:
        """A call to start; ``backward``: the stage runs that will follow it in a call of their
        own."""
        streams = self._pipeline.streams(enabled=batch.config.preserve_rng_state is not False)
        posts = {("x", 0, m): boundary for m, boundary in enumerate(batch.boundaries)}
        resident = self._resident_layers(planned, [passes, backward] if backward else [passes])
        return self._pipeline.prepare(
            passes, settings, streams, posts=posts, resident_layers=resident
        )

    # What an engine that is part of a larger one does otherwise.

    def _use_newest_weights(self) -> None:
        """Evaluation is never stale."""
        self._steps.flush()

    def _make_room(self, planned: Planned) -> None:
        """Layers have device states in what calls leave of the device."""
        self._free_memory.let_device_states(planned)
        if self._host.device_states.must_shrink:
            self._steps.leave_devices()

    def _commit(self, call: Call) -> None:
        """A backward round is over."""
        when_pass_ends(lambda: self._steps.commit(call))

    def _resident_layers(self, planned: Planned, rounds: Sequence[Passes]) -> frozenset[int]:
        return self._free_memory.resident_layers(planned, rounds)

    def _backward_round(
        self, forward: Call, passes: Passes, batch: Batch, outputs: list[Boundary]
    ) -> BackwardCall:
        return BackwardCall(
            begin=self._begin,
            commit=self._commit,
            steps=self._steps,
            device_states=self._host.device_states,
            pipeline=self._pipeline,
            forward=forward,
            passes=passes,
            targets=destinations(batch.boundaries),
            carries=[output.carries for output in outputs],
            made_at=self._steps.weights,
        )

    # What is going on.

    @property
    def devices(self) -> list[Device]:
        """The devices that stages run on."""
        return list(self._pipeline.devices)

    @property
    def planner(self) -> Planner:
        """Costs and limits that plans are made from."""
        return self._planner

    def planning_problem(self, run_type: RunType) -> tuple[LayerCosts, Workload]:
        """Costs of the layers and of a round of ``default_num_microbatch`` microbatches, by what is
        known now."""
        return self._planner.problem(run_type, self.default_num_microbatch)

    @property
    def default_num_microbatch(self) -> int:
        """Microbatches per call where nothing is set: the number of devices + 1."""
        return self._config.num_microbatch or len(self._pipeline.devices) + 1

    @property
    def execute_plan(self) -> ModelExecutePlan:
        """The plan ``forward_backward`` uses by default."""
        grain = self._config.recompute_grain or "stage"
        return self._planner.next_plan(
            "fused", self.default_num_microbatch, self._config.execute_plan, grain=grain
        )

    def statistics(self) -> dict[str, Any]:
        """`Engine.statistics`, and the number of ``layers`` with the ``layer_bytes`` of each on a
        device."""
        return {
            **super().statistics(),
            "layers": len(self._store.layers),
            "layer_bytes": [layer.num_bytes for layer in self._store.layers],
        }

    # What `Engine` asks for.

    def _note_step(self, is_async: bool) -> None:
        self._planner.note_step(is_async)

    def _free_devices(self) -> None:
        self._pipeline.close()


def refuse_hooks(store: ParameterStore) -> None:
    """Devices compute with resident copies, so a hook on the user's own parameter would silently
    never run."""
    for parameter in store.parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"parameter {store.name_of(parameter)!r} has a gradient hook, which would not run: "
                "gradients are "
                "complete only in step_fn; change master.grad there"
            )
