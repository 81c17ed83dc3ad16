"""What users touch: a model whose state lives on the host and whose layers run on devices in turn."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .config import RoundPipeRunConfig
from .device import Device
from .device.choose import DeviceSpec, choose_devices
from .errors import ClosedError, ConfigError
from .forwarding import ForwardingModule
from .memory.pinning import HostMemory, PinMode
from .microbatch import Microbatches, merge, split
from .optim import context
from .optim.hyperparameters import know_master, know_working
from .optim.step_thread import StepHandle, StepThread, leave_cores_for
from .params.copies import Masters
from .params.gradients import GradientBuffers, GradientRules, GradientWindow
from .params.store import ParameterStore
from .plan.execute_plan import ModelExecutePlan, RunType
from .plan.schedule import Passes, backward_passes, forward_passes, fused_passes, saved_layers
from .planner import Planner, size_class
from .runtime.autograd import Gradients, attach
from .runtime.call import Call, CallSettings, LossFn
from .runtime.pipeline import Pipeline, deliver
from .runtime.recompute import AmbientState
from .runtime.replica import Modes
from .runtime.results import backward_into, input_gradients, refuse_shared_buffers, sum_losses, wanted, write_buffers
from .runtime.transfer import Boundary, BoundaryGradient, user_boundary
from .runtime.worker import Worker

_UNSET = RoundPipeRunConfig()


class RoundPipe(ForwardingModule):
    """Runs and trains ``model`` with its state in host memory and its layers visiting devices in turn.

    Args:
        model: an ``nn.Sequential`` (one layer per child) or any module (a single layer), on the CPU.
        optim_dtype: dtype of the optimizer's own copies (masters); None means each parameter's dtype.
        name: shown in logs, traces and errors; default ``file.py:line`` of the caller.
        model_run_config: settings of every call, below what a call sets itself.
        pin_model: ``"alloc"`` moves weights to page-locked memory, ``"register"`` page-locks them in place, ``"off"``
            leaves them alone.
        devices: None for every visible accelerator, else one virtual CPU device; an int for that many virtual devices;
            or a list of devices.
        compile: compile each repeated layer class once with ``torch.compile``.
        grad_dtype: what gradients land in on the host; None means each parameter's dtype.
        max_gpu_memory: bytes (or GB) the engine keeps under on each device.
        process_group: data parallel training over several processes.

    Raises:
        ConfigError: a bad setting, a model without parameters, or weights that cannot be staged.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> with RoundPipe(model, devices=2) as engine:
        ...     optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        ...     x, y = torch.randn(8, 4), torch.randn(8, 1)
        ...     loss = engine.forward_backward((x,), label=y, loss_fn=lambda out, y: ((out - y) ** 2).sum() / 8)
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
        max_gpu_memory: float | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if process_group is not None:
            raise NotImplementedError("process_group: data parallel training is not there yet; use one process")
        chosen = choose_devices(devices, max_gpu_memory)
        self._own = frozenset[str]()  # while it is empty, attributes set are the engine's own
        self._name = name if name is not None else _caller()
        self._config = model_run_config
        self._condition = threading.Condition()
        self._hold(sequence=model, original=model)
        layers = list(model) if isinstance(model, nn.Sequential) else [model]
        self._memory = HostMemory(pin_model, accelerated=any(d.torch_device.type != "cpu" for d in chosen))
        self._store = ParameterStore(layers, self._memory)
        self._rules = GradientRules(optim_dtype, grad_dtype)
        self._buffers_pool = GradientBuffers(self._memory, self._rules)
        self._masters = Masters(self._store, self._rules)
        store, rules, buffers = self._store, self._rules, self._buffers_pool
        self._step_worker = Worker("roundpipe-optimizer")
        if self._memory.is_accelerated:
            self._step_worker.submit(leave_cores_for(len(chosen)))
        self._steps = StepThread(
            self._step_worker,
            self._condition,
            store,
            self._masters,
            lambda: GradientWindow(store, rules, buffers),
        )
        self._pipeline = Pipeline(
            layers, chosen, store, rules, buffers, self._condition, self._steps.is_published, compile=compile
        )
        self._planner = Planner(store, chosen, layers=layers, rules=rules)
        for parameter in store.parameters:
            know_working(parameter)
        # The finalizer only signals: it may run on any thread, also on one of those it would have to join.
        self._finalizer = weakref.finalize(self, _stop, [*self._pipeline.workers, self._step_worker])
        self._is_closed = False
        self.set_original_model(model)
        self._own = frozenset(self.__dict__)

    def set_original_model(self, model: nn.Module) -> None:
        """Names parameters as in ``model`` and forwards attributes to it; its parameters must be the layers' own.

        Raises:
            ConfigError: some parameter of ``model`` is in no layer.
        """
        self._hold(original=model)
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._store.uses:
                raise ConfigError(f"parameter {name!r} of the original model is in no layer of the pipeline")
            self._store.names[id(parameter)] = name
        self._fingerprint = _fingerprint(model)
        names = {id(module): name for name, module in model.named_modules()}
        for index, layer in enumerate(_layers_of(self.__dict__["_sequence"])):
            found = (names[id(module)] for module in layer.modules() if names.get(id(module)))
            self._pipeline.layer_names[index] = next(found, f"{index} ({type(layer).__name__})")

    def __repr__(self) -> str:
        if self._is_closed:
            return f"RoundPipe({self._name}, closed)"
        devices = ", ".join(device.name for device in self._pipeline.devices)
        return f"RoundPipe({self._name}, {len(self._store.layers)} layers on {devices}, {self._steps!r})"

    # Weights: masters, working copies, gradients.

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        """Names and working weights, up to date; in an optimizer context names and masters."""
        if context.sees_masters():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
            return
        self._flush("named_parameters()")
        yield from self.model.named_parameters(prefix, recurse, remove_duplicate)

    def optim_named_parameters(self, prefix: str = "", remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
        """Names (as in the original model) and masters of all trainable parameters; tied weights once."""
        named: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self.model.named_parameters(prefix, remove_duplicate=remove_duplicate):
            if parameter.requires_grad:
                master = self._masters.of(parameter)
                know_master(master)
                named.append((name, master))
        return named

    def optim_parameters(self) -> list[nn.Parameter]:
        """The masters of all trainable parameters, each once. Construct optimizers over these."""
        return [master for _, master in self.optim_named_parameters()]

    def synchronize(self) -> None:
        """Waits for everything, publishes the newest weights, puts copies of accumulated gradients into ``.grad``."""
        self._flush("synchronize()")
        for parameter in self._store.parameters:
            gradient = self._steps.window.gradient(parameter) if parameter.requires_grad else None
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's state dict, every update in it."""
        self._flush("state_dict()")
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights; masters of the loaded keys follow at the incoming precision. Drops accumulated gradients.

        Raises:
            ConfigError: ``assign=True``, which would replace the memory that devices copy from.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True) would replace the engine's weights; use assign=False")
        self._flush("load_state_dict()")
        self._steps.zero_grad()
        self._steps.num_loads += 1
        try:
            return self.model.load_state_dict(state_dict, strict=strict)
        finally:
            # Also after an error, which torch raises with part of the weights loaded, and whatever became of the keys.
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                self._masters.follow_load(parameter, state_dict.get(name))

    def reload_parameters(self) -> None:
        """Makes the masters follow the model's parameters after those were changed in place."""
        self._begin("reload_parameters()")
        self._steps.wait_idle()
        self._steps.raise_late_error()
        if self._masters.are_ahead:
            raise ConfigError(
                "an update was still to be published when the parameters were changed; call synchronize() before "
                "changing them, then reload_parameters()"
            )
        self._steps.zero_grad()
        self._steps.num_loads += 1
        for parameter, _ in self._masters.existing():
            self._masters.follow(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients not yet stepped, and the copies ``synchronize()`` made of them."""
        self._begin("zero_grad()")
        self._steps.zero_grad()
        for parameter in self._store.parameters:
            parameter.grad = None

    def _flush(self, what: str) -> None:
        self._begin(what)
        self._steps.flush()

    # Running.

    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig = _UNSET, **kwargs: Any) -> Any:
        """Splits the inputs, runs the pipeline and merges the outputs.

        Without grad, pending updates are flushed first. With grad the outputs support ``backward()``; that raises
        RuntimeError if ``step`` ran in between.
        """
        self._begin("forward()")
        config = roundpipe_run_config.over(self._config)
        with_grad = torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad
        if not with_grad:
            self._steps.flush()
        parts = self._split(args, kwargs, None, config)
        boundaries = [user_boundary(*inputs) for inputs in parts.inputs]
        plan = self._plan("train" if with_grad else "infer", boundaries, config)
        first_trained = self._first_trained(boundaries)
        if with_grad:
            _refuse_hooks(self._store)
        backward = backward_passes(plan.bwd_plan, first_trained) if with_grad else []
        settings = self._settings(
            config,
            boundaries,
            needs_grad=with_grad,
            first_trained=first_trained,
            saved_layers=saved_layers(backward),
        )
        call = self._run(forward_passes(plan.fwd_plan), settings, config, boundaries)
        with call.awaited():
            call.wait_results()
            call.wait_finished()
            refuse_shared_buffers(call)
            target = torch.device(config.output_device or "cpu")
            if with_grad:
                # Joined on the CPU: there backward runs on the caller's thread, which may wait for devices' backwards.
                outputs = self._delivered(call, torch.device("cpu"))
                values = attach(outputs, wanted(boundaries), self._backward_round(call, backward, boundaries))
            else:
                values = [output.value for output in self._delivered(call, target)]
            merged = merge(values, parts.rows, _merge_rule(config))
            if with_grad and target.type != "cpu":
                merged = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(target), merged)
        write_buffers(call)
        return merged

    def forward_backward(
        self,
        input_args: Sequence[Any] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: LossFn | None = None,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig = _UNSET,
        *,
        microbatches: Sequence[tuple[Sequence[Any], Mapping[str, Any], Any]] | None = None,
    ) -> Any:
        """Runs every microbatch forward, through ``loss_fn(outputs, label)``, and backward.

        Args:
            input_args, input_kwargs: what the first layer is called with, whole; or
            microbatches: ``(args, kwargs, label)`` for each microbatch, already split.
            loss_fn: called once per microbatch on a worker thread; default: the outputs are the loss.

        Returns:
            The **sum** of the microbatches' losses, a detached CPU tensor (a list if ``loss_fn`` returns a sequence);
            with ``return_outputs`` a pair of that and the merged outputs. Returns once these are known: remaining
            backward visits run on, and what fails there is raised by the next call.
        """
        self._begin("forward_backward()")
        config = run_config.over(self._config)
        parts = self._given(input_args, input_kwargs, label, microbatches, config)
        boundaries = [user_boundary(*inputs) for inputs in parts.inputs]
        plan = self._plan("fused", boundaries, config)
        first_trained = self._first_trained(boundaries)
        _refuse_hooks(self._store)
        passes = fused_passes(plan, first_trained)
        settings = self._settings(
            config,
            boundaries,
            needs_grad=True,
            first_trained=first_trained,
            saved_layers=saved_layers(passes),
            loss_fn=loss_fn or _outputs_as_loss,
            labels=parts.labels,
            keeps_outputs=return_outputs,
        )
        call = self._run(passes, settings, config, boundaries)
        tensors = wanted(boundaries)
        with call.awaited():
            call.wait_results()
            if call.streams.drawn or tensors:
                call.wait_finished()
            refuse_shared_buffers(call)
            result = loss = sum_losses(call)
            if return_outputs:
                target = torch.device(config.output_device or "cpu")
                outputs = [output.value for output in self._delivered(call, target, is_shared=True)]
                result = loss, merge(outputs, parts.rows, _merge_rule(config))
            if tensors:
                backward_into(tensors, input_gradients(call, boundaries))
        write_buffers(call)
        self._steps.commit(call)
        return result

    def step(self, step_fn: Callable[..., Any], is_async: bool = True, *args: Any, **kwargs: Any) -> StepHandle:
        """Runs ``step_fn(*args, **kwargs)`` on the optimizer thread, which owns the accumulated gradients from here on.

        Args:
            is_async: return at once, the update being one step stale (gradient t is taken at W_(t-2)); else the update
                is visible to everything after this call.

        Raises:
            What ``step_fn`` raised, here if sync, else at the next engine call.
        """
        self._begin("step()")
        self._planner.note_step(is_async)
        return self._steps.step(step_fn, is_async, args, kwargs)

    def _begin(self, what: str) -> None:
        """The checks at the door of every engine call; raises what failed behind the caller's back since the last."""
        context.refuse_inside(what)
        if self._is_closed:
            raise ClosedError(f"{self._name}: {what} was called after close()")
        self._steps.raise_late_error()
        if _fingerprint(self.model) != self._fingerprint:
            raise ConfigError(
                f"{self._name}: modules or parameters were added, removed, replaced or cast since it was wrapped; "
                "close() this engine and wrap the model again"
            )

    def _given(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        label: Any,
        microbatches: Sequence[tuple[Sequence[Any], Mapping[str, Any], Any]] | None,
        config: RoundPipeRunConfig,
    ) -> Microbatches:
        if microbatches is None:
            return self._split(tuple(args), dict(kwargs or {}), label, config)
        if args or kwargs or label is not None:
            raise ConfigError("give either input_args, input_kwargs and label, or microbatches, not both")
        if not microbatches:
            raise ConfigError("microbatches is empty; give at least one (args, kwargs, label)")
        parts = [split(tuple(given), dict(named), part, 1) for given, named, part in microbatches]
        return Microbatches(
            inputs=tuple(part.inputs[0] for part in parts),
            labels=tuple(part.labels[0] for part in parts),
            rows=tuple(part.rows[0] for part in parts),
            batch_size=sum(part.batch_size for part in parts),
        )

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any, config: RoundPipeRunConfig
    ) -> Microbatches:
        count = config.num_microbatch or self.default_num_microbatch
        return split(args, kwargs, label, count, split_input=config.split_input, split_label=config.split_label)

    def _first_trained(self, boundaries: list[Boundary]) -> int:
        wants_input = any(any(boundary.carries) for boundary in boundaries)
        return 0 if wants_input else self._store.first_trainable_layer()

    def _settings(
        self,
        config: RoundPipeRunConfig,
        boundaries: list[Boundary],
        *,
        needs_grad: bool,
        first_trained: int,
        saved_layers: frozenset[int],
        loss_fn: LossFn | None = None,
        labels: tuple[Any, ...] = (),
        keeps_outputs: bool = False,
    ) -> CallSettings:
        return CallSettings(
            num_layers=len(self._store.layers),
            num_microbatches=len(boundaries),
            needs_grad=needs_grad,
            first_trained=first_trained,
            saved_layers=saved_layers,
            recompute_grain=config.recompute_grain or "stage",
            keeps_outputs=keeps_outputs,
            loss_fn=loss_fn,
            labels=labels,
            version=self._steps.version,
            ambient=AmbientState.of_caller({device.torch_device.type for device in self._pipeline.devices}),
            modes=Modes.of(_layers_of(self.__dict__["_sequence"])),
            measured=self._planner.measured(size_class(boundary.leaves for boundary in boundaries)),
        )

    def _plan(self, run_type: RunType, boundaries: list[Boundary], config: RoundPipeRunConfig) -> ModelExecutePlan:
        return self._planner.plan(
            run_type,
            len(boundaries),
            config.execute_plan,
            shapes=size_class(boundary.leaves for boundary in boundaries),
            grain=config.recompute_grain or "stage",
        )

    def _run(
        self, passes: Passes, settings: CallSettings, config: RoundPipeRunConfig, boundaries: list[Boundary]
    ) -> Call:
        streams = self._pipeline.streams(enabled=config.preserve_rng_state is not False)
        posts = {("x", 0, m): boundary for m, boundary in enumerate(boundaries)}
        return self._pipeline.submit(passes, settings, streams, posts=posts)

    def _delivered(self, call: Call, target: torch.device, *, is_shared: bool = False) -> list[Boundary]:
        count = call.settings.num_microbatches
        return [deliver(call.outputs[m], target, is_shared=is_shared) for m in range(count)]

    def _backward_round(
        self, forward: Call, backward: Passes, boundaries: list[Boundary]
    ) -> Callable[[list[Gradients]], Gradients]:
        made_at = self._steps.weights

        def run(gradients: list[Gradients]) -> Gradients:
            self._begin("backward()")
            if self._steps.weights != made_at:
                raise RuntimeError(
                    "step(), a flush or a load ran between this forward and its backward, so the weights are no longer "
                    "those of the forward; call backward() first"
                )
            posts = {}
            for m, given in enumerate(gradients):
                remaining = iter(given)
                carries = forward.outputs[m].carries
                leaves = tuple(next(remaining) if carried else None for carried in carries)
                posts["g", forward.settings.num_layers, m] = BoundaryGradient(leaves, None, None)
            forward.streams.take_over()
            call = self._pipeline.submit(backward, forward.settings, forward.streams, posts=posts, saved=forward.saved)
            with call.awaited(advance=False):
                call.wait_finished()
            self._steps.commit(call)
            return input_gradients(call, boundaries)

        return run

    # What is going on.

    @property
    def devices(self) -> list[Device]:
        """The devices that stages visit."""
        return list(self._pipeline.devices)

    @property
    def planner(self) -> Planner:
        """Costs and limits that plans are made from."""
        return self._planner

    @property
    def default_num_microbatch(self) -> int:
        """Microbatches per call where nothing is set: the number of devices + 1."""
        return self._config.num_microbatch or len(self._pipeline.devices) + 1

    @property
    def execute_plan(self) -> ModelExecutePlan:
        """The plan ``forward_backward`` uses by default."""
        return self._planner.plan("fused", self.default_num_microbatch, self._config.execute_plan)

    def statistics(self) -> dict[str, Any]:
        """What the engine holds now: bytes per kind of copy, slots per device, steps."""
        return {
            "layers": len(self._store.layers),
            "working_bytes": sum(parameter.nbytes for parameter in self._store.parameters),
            "layer_bytes": [layer.num_bytes for layer in self._store.layers],
            "slot_bytes": self._pipeline.statistics(),
            "steps": self._steps.num_steps,
            **self._masters.statistics(),
        }

    # Ending.

    def close(self) -> None:
        """Flushes, joins the threads and frees the devices. Parameters stay valid. Raises what failed last."""
        if self._is_closed:
            return
        context.refuse_inside("close()")
        try:
            self._steps.flush()
        finally:
            self._is_closed = True
            self._finalizer.detach()
            self._pipeline.close()
            self._step_worker.stop()
            self._step_worker.join()
            self._buffers_pool.clear()
            self._memory.close()

    def __enter__(self) -> "RoundPipe":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        try:
            self.close()
        except BaseException as late:
            if error is None:
                raise
            raise late from error


def _layers_of(sequence: nn.Module) -> list[nn.Module]:
    return list(sequence) if isinstance(sequence, nn.Sequential) else [sequence]


def _fingerprint(model: nn.Module) -> tuple[list[int], list[tuple[int, torch.dtype, torch.Size]]]:
    """Changes when modules or parameters were added, removed or replaced, or parameters cast."""
    modules = [id(module) for module in model.modules()]
    return modules, [(id(parameter), parameter.dtype, parameter.shape) for parameter in model.parameters()]


def _refuse_hooks(store: ParameterStore) -> None:
    """Devices compute with resident copies, so a hook on the user's own parameter would silently never run."""
    for parameter in store.parameters:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"parameter {store.name_of(parameter)!r} has a gradient hook, which would not run: gradients are "
                "complete only in step_fn; change master.grad there"
            )


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _outputs_as_loss(outputs: Any, _: Any) -> Any:
    """The outputs are the loss, or carry it as Hugging Face models' do."""
    return getattr(outputs, "loss", outputs)


def _merge_rule(config: RoundPipeRunConfig) -> Any:
    if config.merge_output is False:
        raise NotImplementedError("merge_output=False is not there yet; leave it unset or give a function")
    return config.merge_output
