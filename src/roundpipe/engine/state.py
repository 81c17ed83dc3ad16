"""One model's state on the host, which one engine owns or the engines of its parts share."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal

import torch
from torch import nn

from ..autoplan.host_room import HostRoom
from ..autoplan.planner import Planner
from ..device import Device
from ..device.choose import DeviceSpec, choose_devices
from ..device.facts import refuse_without_fp8
from ..errors import ClosedError, ConfigError
from ..kernels.compile_ahead import compile_ahead
from ..layers.compiler import BlockCompiler
from ..layers.scaled import use_fp8
from ..layers.structure import Structure
from ..memory.pinning import HostMemory, PinMode
from ..memory.state_file import StateFile
from ..params.dtypes import GradientRules
from ..params.gradient_buffers import GradientBuffers
from ..params.masters import Masters
from ..params.placement.device_states import DeviceStates
from ..params.rank_sums import RankSums
from ..params.ranks import Ranks
from ..params.window import GradientWindow, Master
from ..params.working import ParameterStore
from ..presets.experts.groups import group_experts
from ..presets.experts.low_rank import adapt_without_sums, refuse_to_unmerge
from ..runtime.worker_pool import WorkerPool
from ..step import context
from ..step.hyperparameters import WorkingWeights
from ..step.state_pages import StatePages
from ..step.thread import StepThread
from ..step.turns import make_way
from ..system.cores import leave_cores_for
from ..system.sizes import bytes_of
from ..threads.interpreter import QuietInterpreter
from ..threads.interrupts import SteadyCondition
from ..threads.worker import Worker
from ..transfer.read_ahead import make_read_ahead

ComputeDtype = Literal["fp8"]
_log = logging.getLogger("roundpipe")
_FP8_IS_SLOW = (
    "compute_dtype='fp8' without compile=True: rounding to fp8 takes passes of its own, which may "
    "cost more than its products save"
)


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What `RoundPipe` takes beside a model, a name and a run config."""

    optim_dtype: torch.dtype | None = None
    pin_model: PinMode = "alloc"
    devices: DeviceSpec = None
    compile: bool = False
    grad_dtype: torch.dtype | None = None
    max_gpu_memory: str | float | None = None
    max_host_memory: str | float | None = None
    optimizer_state_dir: str | os.PathLike[str] | None = None
    compute_dtype: ComputeDtype | None = None
    cuda_graphs: bool | None = None
    process_group: Any = None

    def __post_init__(self) -> None:
        for name, dtype in (("optim_dtype", self.optim_dtype), ("grad_dtype", self.grad_dtype)):
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ConfigError(
                    f"{name} is {dtype!r}; give a floating-point dtype, such as torch.float32"
                )
        if self.process_group is not None and self.optimizer_state_dir is not None:
            raise ConfigError(
                f"process_group with optimizer_state_dir={str(self.optimizer_state_dir)!r}: state "
                "that is shared out over ranks has to be in memory; leave one of them out"
            )
        if self.compute_dtype not in (None, "fp8"):
            raise ConfigError(
                f"compute_dtype is {self.compute_dtype!r}; use 'fp8', or leave it out to compute "
                "in the weights' dtype, or in autocast's"
            )

    @property
    def max_host_bytes(self) -> float:
        most = self.max_host_memory
        return inf if most is None else bytes_of(most, "max_host_memory")

    def choose_devices(self) -> list[Device]:
        """The devices that were asked for, or ConfigError."""
        are_shared = self.process_group is not None
        devices = choose_devices(self.devices, self.max_gpu_memory, are_shared=are_shared)
        if self.compute_dtype == "fp8":
            refuse_without_fp8(devices)
        return devices


class Host:
    """Weights, masters, gradients, the thread that updates them, and a worker pool that computes
    with them.

    Made, entered and closed by the caller's thread. Holds no reference to an engine.

    Args:
        name: its engine's.
        layers: all layers of all runners.
        on_host: parameters that the caller's thread computes with itself; see `ParameterStore`.
        ranks: the processes that make it together. None for this one alone.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[nn.Module],
        devices: Sequence[Device],
        settings: HostSettings,
        on_host: Sequence[nn.Parameter] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.name = name
        self.is_closed = False
        self._process = os.getpid()
        # Before the store, which moves weights that another engine's thread may be writing to.
        inside = (parameter for layer in layers for parameter in layer.parameters())
        parameters = [*on_host, *inside]
        make_way(parameters)
        self.rules = rules = GradientRules(settings.optim_dtype, settings.grad_dtype)
        is_accelerated = any(device.torch_device.type != "cpu" for device in devices)
        # Both before weights are moved, because they may be refused.
        prepare: list[Callable[[nn.Module], None]] = [
            refuse_to_unmerge,
            adapt_without_sums,
            group_experts,
        ]
        if settings.compute_dtype is not None:
            prepare.append(use_fp8(layers))
            if is_accelerated and not settings.compile:
                _log.warning("%s: %s", name, _FP8_IS_SLOW)
        self.room = HostRoom(
            settings.max_host_bytes,
            parameters,
            rules,
            has_state_file=settings.optimizer_state_dir is not None,
            num_ranks=1 if ranks is None else ranks.count,
        )
        self.room.refuse_too_little(in_files=self.room.frozen if settings.pin_model == "off" else 0)
        state_file = _state_file(settings.optimizer_state_dir, self.room)
        self.ranks = ranks = ranks or Ranks()
        is_alone = ranks.count == 1 and state_file is None
        self.condition = SteadyCondition()
        self.memory = HostMemory(settings.pin_model, accelerated=is_accelerated)
        ranks.link(settings.process_group, devices[0], self.memory)
        self.store = store = ParameterStore(layers, self.memory, on_host)
        # Before threads are started, because it refuses files that were cut.
        read_ahead = make_read_ahead(store, self.memory)
        self.device_states = DeviceStates(
            store, devices[0] if len(devices) == 1 and is_alone else None, self.memory
        )
        ranks.assign(store.parameters)
        self.masters = Masters(store, rules, state_file or Master.memory, ranks)
        pages = None if state_file is None else StatePages(state_file)
        self._worker = Worker("roundpipe-optimizer", None if pages is None else pages.writer)
        self.buffers = buffers = GradientBuffers(self.memory, rules, self._worker.submit)
        # On the CPU layers run in the interpreter themselves, so there is nothing to keep it free
        # for.
        self._interpreter = QuietInterpreter() if is_accelerated else None
        if is_accelerated:
            self._worker.submit(leave_cores_for(len(devices)))
            found = [device.torch_device for device in devices]
            trained = {own.dtype for own in store.parameters if own.requires_grad}
            self._worker.submit(partial(compile_ahead, found, trained))
        self.steps = StepThread(
            self._worker,
            self.condition,
            store,
            self.masters,
            self.device_states,
            RankSums(ranks, store, rules),
            lambda: GradientWindow(store, rules, buffers),
            pages,
            settings.max_host_bytes,
        )
        self.steps.name = name
        self.worker_pool = WorkerPool(
            devices,
            store,
            self.memory,
            BlockCompiler(layers if settings.compile else (), devices, prepare),
            read_ahead,
            captures=settings.cuda_graphs,
        )
        self.steps.load_listeners.append(self.worker_pool.forget_buffers)
        # Because a step may make moments, and what the first call's guesses took is their room.
        self.steps.step_listeners.append(self.worker_pool.blocks.shrink)
        self.steps.update_listeners.append(self.room.note_update)
        self._working = WorkingWeights(store.parameters)

    @property
    def workers(self) -> list[Worker]:
        """All threads."""
        read_ahead = self.worker_pool.read_ahead
        readers = [] if read_ahead is None else read_ahead.workers
        return [*self.worker_pool.workers, self._worker, *readers]

    def device_bytes(self) -> dict[str, int] | None:
        """What is held on each device that a plan need not count; None while something is under
        way."""
        if not self.steps.is_idle:
            return None
        slots, device_states = self.worker_pool.statistics(), self.device_states.held_bytes
        return {name: num_bytes + device_states for name, num_bytes in slots.items()}

    def planner(
        self, store: ParameterStore, layers: Sequence[nn.Module], *, keeps_layers: bool
    ) -> Planner:
        """For ``layers``, of which ``store`` has the parameters."""
        return Planner(
            store,
            self.worker_pool.devices,
            layers=layers,
            rules=self.rules,
            held_bytes=self.device_bytes,
            input_room=self._input_room,
            keeps_layers=keeps_layers,
        )

    def _input_room(self) -> float:
        return self.room.for_inputs(
            self.worker_pool.blocks.num_bytes,
            has_masters=bool(self.masters.by_parameter),
            has_stepped=self.steps.num_steps > 0,
        )

    def follow(self, model: nn.Module) -> None:
        """Parameters are named as in ``model``.

        Raises:
            ConfigError: some parameter of ``model`` is in no layer.
        """
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.store.uses:
                raise ConfigError(
                    f"parameter {name!r} of the original model is in no layer of the pipeline"
                )
            self.store.names[id(parameter)] = name

    def begin(self, what: str, structure: Structure) -> None:
        """The checks at the door of every engine call; raises what failed behind the caller's back
        since the last."""
        context.refuse_inside(what)
        if self.is_closed:
            raise ClosedError(f"{self.name}: {what} was called after close()")
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self.name}: {what} was called in a forked process, which has none of the "
                "engine's threads; call it in the process that made the engine"
            )
        self.steps.turns.take()
        self.steps.user_writes.notice()
        self.steps.raise_late_error()
        if self._interpreter is not None:
            self._interpreter.begin_call()
        if structure.has_changed():
            raise ConfigError(
                f"{self.name}: modules or parameters were added, removed, replaced or cast since "
                "it was wrapped; close() this engine and wrap the model again"
            )

    def rest(self) -> None:
        """No call is likely for a while."""
        if self._interpreter is not None:
            self._interpreter.rest()

    def close(self) -> None:
        """Joins the threads after the jobs already queued, and unlocks memory. Parameters stay
        valid."""
        self.is_closed = self._working.is_closed = self.steps.is_closed = True
        # First, because an interrupt of what follows must not leave it without an end.
        self._worker.stop()
        try:
            try:
                self.worker_pool.close()
            finally:
                self._worker.join()
                self.ranks.close()
                # Only now, because until then that thread may update what is there.
                self.device_states.clear()
        finally:
            if self._interpreter is not None:
                self._interpreter.close()
        self.buffers.clear()
        self.store.writes.forget()
        self.memory.close()


def make_host(
    name: str,
    layers: Sequence[nn.Module],
    settings: HostSettings,
    on_host: Sequence[nn.Parameter] = (),
) -> Host:
    """A `Host` on the devices of the ``settings``. Its ranks meet before anything that one of them
    alone may refuse, so that the others hear of it and do not wait for one that never comes."""
    ranks, made = Ranks(settings.process_group), None
    try:
        with ranks.agreeing("making the engine"):
            made = Host(name, layers, settings.choose_devices(), settings, on_host, ranks)
        # Because messages follow layers, and owners what trains.
        ranks.meet(f"of {made.store.outline()}")
    except BaseException:
        if made is None:
            ranks.close()
        else:
            made.close()  # because its threads would be left, when another rank has failed
        raise
    return made


def _state_file(folder: str | os.PathLike[str] | None, room: HostRoom) -> StateFile | None:
    """None where state lies in memory."""
    if folder is None:
        return None
    file = StateFile(folder)
    file.refuse_lack_of(*room.on_disk)
    return file
