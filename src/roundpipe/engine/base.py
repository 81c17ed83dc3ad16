"""An engine as its user sees it, whatever runs inside: weights, steps, and the end."""

import sys
import weakref
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Self

import torch
from torch import nn

from ..config import RoundPipeRunConfig
from ..device import Device
from ..errors import ConfigError
from ..layers.structure import Structure
from ..params.ranks import Ranks
from ..step import context
from ..step.handle import StepHandle
from ..step.thread import StepThread
from ..threads.worker import Worker
from ..trace.table import Statistics
from .generation import through_copy
from .runner import BatchRunner
from .state import Host
from .weights import HostWeights, let_pass


def check_model(model: Any) -> None:
    """Raises ConfigError for what cannot be wrapped: an engine, no module at all, or one whose code
    is bound to its own weights."""
    if isinstance(model, Engine):
        raise ConfigError("this model is wrapped already; wrap engine.model to wrap it anew")
    if not isinstance(model, nn.Module):
        what = (
            f"the class {model.__name__}"
            if isinstance(model, type)
            else f"a {type(model).__name__}"
        )
        raise ConfigError(f"the model is {what}; give an nn.Module, such as nn.Sequential(*layers)")
    for name, module in model.named_modules():
        remedy = next(
            (
                remedy
                for kind, remedy in _BOUND.items()
                if kind in map(_full_name, type(module).__mro__)
            ),
            None,
        )
        if remedy is not None:
            raise ConfigError(f"{name or 'the model'} is a {type(module).__name__}, which {remedy}")


# Kinds of modules that compute with their own weights only, or do not keep them; by name, because
# some are only there once imported.
_BOUND = {
    "torch._dynamo.eval_frame.OptimizedModule": (
        "computes with the weights it was compiled with; wrap the module that was given to "
        "torch.compile, and pass compile=True"
    ),
    "torch.jit._script.RecursiveScriptModule": (
        "computes with the weights it was scripted with; wrap the module that was given to "
        "torch.jit"
    ),
    "peft.tuners.lora.layer.MultiheadAttention": (
        "replaces the attention's weights by new ones in every forward; leave it out of PEFT's "
        "target_modules, or build the attention from nn.Linear layers and name those there"
    ),
    "torch.nn.parallel.data_parallel.DataParallel": (
        "spreads a model over devices itself; wrap its .module"
    ),
    "torch.nn.parallel.distributed.DistributedDataParallel": (
        "spreads a model over devices itself; wrap its .module"
    ),
}


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Engine(HostWeights):
    """A model whose weights are trained on the host. Used by one thread, the caller's.

    Whoever makes one adds its ``_runners`` and last calls ``set_original_model``.

    Args:
        host: the model's state, and the devices' workers.
        model: whose layers run.
        config: of calls that are given none.
    """

    def __init__(self, host: Host, model: nn.Module, config: RoundPipeRunConfig) -> None:
        super().__init__()
        self._host = host
        self._sequence = model
        self._config = config
        self._store = host.store
        self._masters = host.masters
        self._steps = host.steps
        self._runners: list[BatchRunner] = []
        let_pass(host.store.parameters)  # because these gradients are older than the engine
        trained = [parameter for parameter in host.store.parameters if parameter.requires_grad]
        try:
            host.ranks.share([*trained, *model.buffers()])
        except BaseException:
            host.close()  # because nobody else can: its threads and its group would be left
            raise
        # The finalizer only signals: it may run on any thread, also on one of those it would have
        # to join.
        self._finalizer = weakref.finalize(self, _stop, host.steps, host.workers)

    def set_original_model(self, model: nn.Module) -> None:
        """Names parameters as in ``model`` and forwards attributes to it, also those that are set
        from here on; its parameters must be the layers' own.

        Raises:
            ConfigError: some parameter of ``model`` is in no layer.

        Example:
            >>> layers = nn.Sequential(model.embeddings, *model.blocks, model.head)
            >>> engine = RoundPipe(layers)
            >>> engine.set_original_model(model)  # state_dict() has the model's own names
        """
        self._host.follow(model)
        for runner in self._runners:
            runner.name_layers(model)
        self._structure = Structure([model])
        self._original = model

    def __getattr__(self, name: str) -> Any:
        """The original model's, as everywhere; where that has none, ``name`` is the engine's in
        logs and errors, and ``num_layers`` counts what it runs on devices. What a model of
        transformers' generates is generated on a device."""
        try:
            found = super().__getattr__(name)
            if name != "generate":
                return found
            return through_copy(self, self._host.worker_pool.devices[0], found)
        except AttributeError:
            if name == "name" and "_host" in self.__dict__:
                return self._host.name
            if name == "num_layers" and "_runners" in self.__dict__:
                return sum(len(runner.layers) for runner in self._runners)
            raise

    # Steps and checks.

    def step(
        self, step_fn: Callable[..., Any], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> StepHandle:
        """Runs ``step_fn(*args, **kwargs)`` on the optimizer thread, which owns the accumulated
        gradients from here on.

        Hyper-parameters of the optimizers are read at this call, so a scheduler may step right
        after it. Gradients that ``step_fn`` does not zero, also because it raises, are there again
        in the next one, with what came since added, as in torch. So a ``step_fn`` that steps and
        zeroes every k-th time accumulates.

        Args:
            step_fn: steps one or more optimizers over ``optim_parameters()``, clips before that if
                it likes, and calls their ``zero_grad``. An optimizer's own ``step``, which has no
                place for that, is followed by its ``zero_grad``. Engine calls are refused inside.
            is_async: return at once, the update being one step stale (gradient t is taken at
                W_(t-2)); else the update is visible to everything after this call.
            args, kwargs: what ``step_fn`` is called with.

        Returns:
            A handle, to wait for the update or for what ``step_fn`` returned.

        Raises:
            What ``step_fn`` raised, here if sync, else at the next engine call.
            ConfigError: ``step_fn`` is no function, or this is called inside one; or a gradient did
                not come through the engine, and the update would not see it.

        Example:
            >>> def update(max_norm):
            ...     norm = roundpipe.clip_grad_norm_(optimizer, max_norm)
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            ...     return norm
            >>> norm = engine.step(update, True, 1.0).result()
        """
        self._begin("step()")
        if not callable(step_fn):
            raise ConfigError(
                "step() needs a function to call, such as optimizer.step; it was given "
                f"{type(step_fn).__name__}"
            )
        if self._host.ranks.count > 1 and not is_async:
            # What fails behind the caller's back is for him alone then, who may run it again.
            self._steps.wait_idle()
            self._steps.raise_late_error()
        self._refuse_other_gradients()
        self._steps.user_writes.follow()
        for runner in self._runners:
            runner.planner.note_step(is_async)
        return self._steps.step(step_fn, is_async, args, kwargs)

    def add_gradients(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Adds to what the next step finds. Of a process group each rank adds its own, and all are
        summed.

        Args:
            gradients: by the model's parameter, in its shape; not to be written from here on.
        """
        self._begin("add_gradients()")
        self._steps.add_gradients(gradients)

    @property
    def ranks(self) -> Ranks:
        """The processes that train this model together."""
        return self._host.ranks

    def rest(self) -> None:
        """Says that no call is likely for a while, as when training has ended: what is alive once
        it has settled is kept from the garbage collector until then, also if it is dropped in a
        circle of references. May be called at any time, waits for nothing, and calls afterwards are
        as ever."""
        self._host.rest()

    # What is going on.

    @property
    def devices(self) -> list[Device]:
        """The devices that stages run on."""
        return list(self._host.worker_pool.devices)

    @property
    def default_num_microbatch(self) -> int:
        """Microbatches per call (of a part) where nothing is set: the number of devices + 1."""
        return self.num_microbatch_of_each(1)

    def num_microbatch_of_each(self, batches: int) -> int:
        """Microbatches of each of so many batches in one call. Where nothing is set, all together
        make at least the number of devices + 1."""
        return self._config.num_microbatch or -(-(len(self.devices) + 1) // batches)

    def _repr_html_(self) -> str:
        counted = "" if self.is_closed else Statistics(self.statistics())._repr_html_()
        return f"<pre>{escape(repr(self))}</pre>{counted}"

    def statistics(self) -> dict[str, Any]:
        """Says what the engine does and holds at this moment, without waiting for anything.

        ``is_idle``: no update and no gradient is on its way; ``steps``: taken so far; ``version``:
        the step whose weights a call made now would use; ``working_bytes``: of the user's own
        parameters; ``masters`` and ``master_bytes``: number and bytes of the optimizer's copies;
        ``state_file_bytes``: of optimizer state on a disk, masters included;
        ``slot_bytes``: of weights on each device, by its name; ``second_buffer_bytes``: of second
        working copies; ``device_state_bytes``: of layers whose optimizer state is on a device;
        ``spill_bytes``: of inputs kept on the host for want of room on a device.
        """
        return Statistics(
            is_idle=self._steps.is_idle,
            steps=self._steps.num_steps,
            version=self._steps.version,
            working_bytes=sum(parameter.nbytes for parameter in self._store.parameters),
            slot_bytes=self._host.worker_pool.statistics(),
            spill_bytes=self._host.worker_pool.blocks.num_bytes,
            **self._masters.statistics(),
        )

    def free_devices(self) -> None:
        """Frees what stays on the devices between calls: weights, and buffers for those that pass.

        The next call uploads them again. Optimizer state that is on a device stays, and so do
        graphs that wait for their backward. Waits for calls and steps under way, and raises what
        has failed in them.

        Raises:
            ClosedError: the engine was closed.
        """
        self._flush("free_devices()")
        for runner in self._runners:
            runner.free_devices()
        self._host.worker_pool.wait()

    # Ending.

    @property
    def is_closed(self) -> bool:
        """True once `close` was called, after which the model is an ordinary one again."""
        return self._host.is_closed

    def close(self) -> None:
        """Flushes, joins the threads and frees the devices. Parameters stay valid.

        Leaving a ``with`` block closes too. Closing twice does nothing the second time. An update
        or a late backward that failed is raised here, when everything is closed.
        """
        if self.is_closed:
            return
        context.refuse_inside("close()")
        try:
            try:
                self._steps.user_writes.notice()
            finally:
                self._steps.flush()
        finally:
            self._host.is_closed = True
            for runner in self._runners:
                runner.free_devices()
            self._host.close()
            self._finalizer.detach()  # only now, so that threads end in any case

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        try:
            self.close()
        except BaseException as late:
            if error is None:
                raise
            raise late from error


def call_site() -> str:
    """``file.py:line`` of whoever has called into this package: an engine's name where none is
    given."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("roundpipe."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _stop(steps: StepThread, workers: list[Worker]) -> None:
    steps.end_forgotten()
    for worker in workers:
        worker.stop()
