"""Compiled forwards for layers that repeat. Knows nothing of stages: whoever makes a replica hands
it over."""

import functools
import logging
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..device import Device
from .modes import Modes, hook_tables

_log = logging.getLogger("roundpipe")
# Where a forward says that only a part of it can be compiled: that function, and what makes the
# forward of it.
COMPILES = "_roundpipe_compiles"
# Where a class of layers names its attributes of which each value makes code of its own.
APART = "_roundpipe_compiled_apart"


class BlockCompiler:
    """Compiles each repeated layer class once a device; all its layers, and all their replicas,
    share the result.

    The compiler counts what it has made of a code object, and stops after a few: variants for other
    devices, modes and shapes, of every engine in the process. Hence a code object for each engine
    and device, one for each kind of layer of the class (by the classes of its inner modules and
    what `APART` names), and one for each choice of inner modules that have hooks, because it takes
    for granted that modules without any get none.

    [Note: compiling on several devices] A compilation patches ``nn.Module`` and sets flags for the
    whole process, so two at a time would leave them set. Its lock lets one worker compile after the
    other, except that of a backward, which comes with the first call: so here that is compiled
    along with its forward. And a compiled forward refuses to be entered while another is compiled
    (some versions of torch do): then it is entered once that is over.

    [Note: compiled code and the interpreter] What the compiler makes queues kernels from Python, so
    that the workers of several devices would take turns. For those it is code in C++, which lets go
    of the interpreter: on two H200 a step takes 6 % less, and compiling it three times as long.
    With one device that gains nothing.

    Args:
        layers: among which classes repeat; none for a compiler that leaves all as it is.
        devices: those of an engine.
        prepare: what is done to each replica first, compiled or not.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        devices: Sequence[Device] = (),
        prepare: Sequence[Callable[[nn.Module], None]] = (),
    ) -> None:
        self._prepare = prepare
        counts = Counter(type(layer) for layer in layers)
        self._kinds = {kind for kind, count in counts.items() if count > 1}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        num_accelerators = sum(device.torch_device.type != "cpu" for device in devices)
        self._in_cpp = num_accelerators > 1

    def apply(self, replica: nn.Module, device: Device, modes: Modes) -> None:
        """The replica's ``__call__``, hooks included, now runs the compiled forward. Called by the
        device's worker."""
        for change in self._prepare:
            change(replica)
        kind = type(replica)
        if kind not in self._kinds or "forward" in replica.__dict__:
            return
        inner = tuple(map(type, replica.modules()))
        values = tuple(getattr(replica, name) for name in getattr(kind, APART, ()))
        key = kind, device.name, inner, values, _hooked(replica) if modes.hooks else ()
        replica.__dict__["forward"] = types.MethodType(self._compile(kind, device, key), replica)

    def _compile(self, kind: type[nn.Module], device: Device, key: Any) -> Callable[..., Any]:
        """The compiled forward of ``kind``, made once for each ``key``."""
        if key not in self._compiled:
            backend = _Backend(f"{kind.__name__} for {device.name}", self._in_cpp)
            part, around = getattr(kind.forward, COMPILES, (kind.forward, None))
            compiled = _entered_alone(torch.compile(_own_code(part), backend=backend))
            self._compiled[key] = compiled if around is None else around(compiled)
        return self._compiled[key]

    def part_of(
        self, replica: nn.Module, device: Device
    ) -> Callable[[type[nn.Module]], Callable[..., Any]] | None:
        """Returns what gives the compiled forward of a class, for modules inside of ``replica``
        that run by themselves; None where that is not compiled."""
        if type(replica) not in self._kinds:
            return None

        def compiled(kind: type[nn.Module]) -> Callable[..., Any]:
            return self._compile(kind, device, (kind, device.name))

        return compiled

    def let_go(self, replica: nn.Module) -> None:
        """Breaks the circle that `apply` has made, so that the replica goes as soon as nobody uses
        it."""
        bound = replica.__dict__.get("forward")
        if bound is not None and getattr(bound, "__func__", None) in self._compiled.values():
            del replica.__dict__["forward"]


class _Backend:
    """Compiles forward and backward, on the thread that has the compiler's lock. What cannot be
    compiled runs as it is.

    Args:
        what: is compiled, for messages.
        in_cpp: whether code that queues kernels is to be C++, if that can be compiled; see
            [Note: compiled code and the interpreter].
    """

    def __init__(self, what: str, in_cpp: bool) -> None:
        self._what = what
        self._ways = ({"cpp_wrapper": True}, {}) if in_cpp else ({},)
        # Of the first line, because a first step that takes minutes looks like a hang.
        self._level = logging.WARNING

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.exc import RestartAnalysis
        from torch._functorch import config as aot_config
        from torch._inductor.compile_fx import compile_fx

        _log.log(
            self._level,
            "compiling %s: up to some minutes, seconds if it was compiled before",
            self._what,
        )
        self._level = logging.INFO
        for way in self._ways:
            try:
                with aot_config.patch(force_non_lazy_backward_lowering=True):
                    return cast("Callable[..., Any]", compile_fx(graph, inputs, config_patches=way))
            except RestartAnalysis:
                raise  # asks for another graph
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                _log.info("%s was not compiled with %s", self._what, way, exc_info=True)
        _log.warning(
            "%s runs without being compiled, which is slower, because of %s", self._what, reason
        )
        return graph.forward


def _entered_alone(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """See [Note: compiling on several devices]."""

    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except RuntimeError as error:
            if not _is_refused_entry(error):
                raise
        from torch._dynamo.convert_frame import compile_lock

        with compile_lock:  # because whoever compiles holds it
            return compiled(*args, **kwargs)

    return forward


def _is_refused_entry(error: RuntimeError) -> bool:
    """Whether the compiler's own first frame has raised it, so that nothing of the layer has
    run."""
    entry = error.__traceback__ and error.__traceback__.tb_next
    return entry is not None and entry.tb_next is None and "FX to symbolically trace" in str(error)


def _hooked(module: nn.Module) -> tuple[int, ...]:
    """Which of the inner modules have hooks, and of what kind."""
    inner = enumerate(module.modules())
    return tuple(
        number
        for place, part in inner
        if place
        for number, table in enumerate(hook_tables(part), place << 4)
        if table
    )


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, types.FunctionType):
        return function
    code, parts = (
        function.__code__.replace(),
        (function.__name__, function.__defaults__, function.__closure__),
    )
    own = types.FunctionType(code, function.__globals__, *parts)
    own.__kwdefaults__ = function.__kwdefaults__
    return own
