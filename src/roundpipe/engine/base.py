"""What every engine is to its user, whatever runs inside: weights, steps, and the end. Knows
nothing of forwards."""

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from torch import nn

from ..errors import ClosedError, ConfigError
from ..layers.structure import Structure
from ..step import context
from ..step.handle import StepHandle
from ..step.hyperparameters import know_master
from ..step.thread import StepThread
from ..threads.worker import Worker
from .forwarding import ForwardingModule
from .state import Host


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


# Kinds of modules that compute with their own weights only; by name, because some are only there
# once imported.
_BOUND = {
    "torch._dynamo.eval_frame.OptimizedModule": (
        "computes with the weights it was compiled with; wrap the module that was given to "
        "torch.compile, and pass "
        "compile=True"
    ),
    "torch.jit._script.RecursiveScriptModule": (
        "computes with the weights it was scripted with; wrap the module that was given to "
        "torch.jit"
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


class Engine(ForwardingModule):
    """A model whose weights are trained on the host. Used by one thread, the caller's.

    ``_take`` comes first and ``_seal`` last in a subclass's ``__init__``.
    """

    def _take(self, name: str, host: Host) -> None:
        """Owns ``host`` from here on."""
        self._own = frozenset[str]()  # while it is empty, attributes set are the engine's own
        self._name = name
        self._host = host
        self._store = host.store
        self._masters = host.masters
        self._steps = host.steps
        self._steps.name = self._steps.name or name  # the whole's, which comes before its parts
        self._is_closed = False
        self._process = os.getpid()
        # The finalizer only signals: it may run on any thread, also on one of those it would have
        # to join.
        self._finalizer = weakref.finalize(self, _stop, host.steps, host.workers)

    def _seal(self) -> None:
        """From here on attributes set go to the original model."""
        self._own = frozenset(self.__dict__)

    def _look_at(self, model: nn.Module) -> None:
        """``model`` is the original: parameters are named as there, and what changes its structure
        is noticed.

        Raises:
            ConfigError: some parameter of ``model`` is in no layer.
        """
        self._hold(original=model)
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._store.uses:
                raise ConfigError(
                    f"parameter {name!r} of the original model is in no layer of the pipeline"
                )
            self._store.names[id(parameter)] = name
        self._structure = Structure([model])

    # Weights: masters, working copies, gradients.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Names and working weights, up to date; in an optimizer context names and masters."""
        if context.sees_masters():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
            return
        self._flush("named_parameters()")
        yield from self.model.named_parameters(prefix, recurse, remove_duplicate)

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> list[tuple[str, nn.Parameter]]:
        """Names (as in the original model) and masters of all trainable parameters; tied weights
        once."""
        named: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self.model.named_parameters(
            prefix, remove_duplicate=remove_duplicate
        ):
            if parameter.requires_grad:
                master = self._masters.of(parameter)
                know_master(master)
                named.append((name, master))
        return named

    def optim_parameters(self) -> list[nn.Parameter]:
        """The masters of all trainable parameters, each once. Construct optimizers over these."""
        return [master for _, master in self.optim_named_parameters()]

    def synchronize(self) -> None:
        """Waits for everything, writes back the newest weights, puts copies of accumulated
        gradients into ``.grad``."""
        self._flush("synchronize()")
        for parameter in self._store.parameters:
            gradient = self._steps.window.gradient(parameter) if parameter.requires_grad else None
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's state dict, every update in it."""
        self._flush("state_dict()")
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads weights; masters of the loaded keys follow at the incoming precision. Drops
        accumulated gradients.

        Raises:
            ConfigError: ``assign=True``, which would replace the memory that devices copy from.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace the engine's weights; use assign=False"
            )
        self._flush("load_state_dict()")
        self._steps.zero_grad()
        self._steps.note_load()
        try:
            return self.model.load_state_dict(state_dict, strict=strict)
        finally:
            # Also after an error, which torch raises with part of the weights loaded, and whatever
            # became of the keys.
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                self._masters.follow_load(parameter, state_dict.get(name))

    def reload_parameters(self) -> None:
        """Makes the masters follow the model's parameters after those were changed in place.

        A master whose parameter is still what it written back keeps its own precision.
        """
        self._begin("reload_parameters()")
        self._steps.wait_idle()
        self._steps.raise_late_error()
        if self._masters.are_ahead:
            raise ConfigError(
                "an update was still to be written back when the parameters were changed; call "
                "synchronize() before "
                "changing them, then reload_parameters()"
            )
        self._steps.zero_grad()
        self._steps.note_load()
        for parameter, _ in self._masters.existing():
            self._masters.follow_load(parameter, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients not yet stepped, and the copies ``synchronize()`` made of them."""
        self._begin("zero_grad()")
        self._steps.zero_grad()
        for parameter in self._store.parameters:
            parameter.grad = None

    def _flush(self, what: str) -> None:
        self._begin(what)
        self._steps.flush()

    # Steps and checks.

    def step(
        self, step_fn: Callable[..., Any], is_async: bool = True, *args: Any, **kwargs: Any
    ) -> StepHandle:
        """Runs ``step_fn(*args, **kwargs)`` on the optimizer thread, which owns the accumulated
        gradients from here on.

        Args:
            is_async: return at once, the update being one step stale (gradient t is taken at
                W_(t-2)); else the update is visible to everything after this call.

        Raises:
            What ``step_fn`` raised, here if sync, else at the next engine call.
            ConfigError: ``step_fn`` is no function.
        """
        self._begin("step()")
        if not callable(step_fn):
            raise ConfigError(
                "step() needs a function to call, such as optimizer.step; it was given "
                f"{type(step_fn).__name__}"
            )
        self._note_step(is_async)
        return self._steps.step(step_fn, is_async, args, kwargs)

    def _note_step(self, is_async: bool) -> None:
        """Tells planners how rounds follow each other."""
        raise NotImplementedError

    def _begin(self, what: str) -> None:
        """The checks at the door of every engine call; raises what failed behind the caller's back
        since the last."""
        context.refuse_inside(what)
        if self._is_closed:
            raise ClosedError(f"{self._name}: {what} was called after close()")
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self._name}: {what} was called in a forked process, which has none of the "
                "engine's threads; call it "
                "in the process that made the engine"
            )
        self._steps.turns.take()
        self._steps.raise_late_error()
        self._host.begin_call()
        if self._structure.has_changed():
            raise ConfigError(
                f"{self._name}: modules or parameters were added, removed, replaced or cast since "
                "it was wrapped; "
                "close() this engine and wrap the model again"
            )

    def rest(self) -> None:
        """Says that no call is likely for a while, as when training has ended: what is alive once
        it has settled is kept from the garbage collector until then, also if it is dropped in a
        circle of references. May be called at any time, waits for nothing, and calls afterwards are
        as ever."""
        self._host.rest()

    # What is going on.

    def statistics(self) -> dict[str, Any]:
        """What the engine does and holds at this moment, without waiting for anything.

        ``is_idle``: no update and no gradient is on its way; ``steps``: taken so far; ``version``:
        the step whose weights a call made now would use; ``working_bytes``: of the user's own
        parameters; ``masters`` and ``master_bytes``: number and bytes of the optimizer's copies;
        ``slot_bytes``: of weights on each device; ``second_buffer_bytes``: of second working
        copies; ``device_state_bytes``: of layers whose optimizer state is on a device;
        ``spill_bytes``: of inputs kept on the host for want of room on a device.
        """
        return {
            "is_idle": self._steps.is_idle,
            "steps": self._steps.num_steps,
            "version": self._steps.version,
            "working_bytes": sum(parameter.nbytes for parameter in self._store.parameters),
            "slot_bytes": self._host.worker_pool.statistics(),
            "spill_bytes": self._host.worker_pool.blocks.num_bytes,
            **self._masters.statistics(),
        }

    # Ending.

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, after which the model is an ordinary one again."""
        return self._is_closed

    def close(self) -> None:
        """Flushes, joins the threads and frees the devices. Parameters stay valid. Raises what
        failed last."""
        if self._is_closed:
            return
        context.refuse_inside("close()")
        try:
            self._steps.flush()
        finally:
            self._is_closed = True
            self._free_devices()
            self._host.close()
            self._finalizer.detach()  # only now, so that threads end in any case

    def _free_devices(self) -> None:
        """Submits to the workers whatever frees what the engine holds on devices."""
        raise NotImplementedError

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
