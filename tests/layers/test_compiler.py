"""Compiled layers: what cannot be compiled runs all the same; hooks that come later; on several
devices one compilation at a time, and calls wait for its end."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from roundpipe.layers import compiler
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import plain_call

BATCH = mlp_batch(rows=6)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden).tanh()


class Numbered(Inner):
    """Layers of two numbers compute by other code."""

    _roundpipe_compiled_apart = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1 + self.number / 16)


class Activated(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.inner(hidden))
        return activated


_ACTIVATIONS = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish)
KINDS = {
    "inner modules": lambda: [Activated(one()) for one in (*_ACTIVATIONS, nn.Softsign, nn.ReLU6)],
    "attributes": lambda: [Numbered(number) for number in range(10)],
}


class WatchedLock:
    """The compiler's, in tests' hands: says when somebody waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        self.is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()


@pytest.fixture
def triggers() -> Iterator[list[CallbackTrigger]]:
    """Of each compilation while the test runs."""
    seen: list[CallbackTrigger] = []

    def note(args: CallbackArgs) -> None:
        seen.append(args.callback_trigger)

    callback_handler.register_start_callback(note)
    yield seen
    callback_handler.remove_start_callback(note)


@pytest.mark.parametrize("on", [TWO, THREE], ids=str)
def test_no_backward_is_compiled_beside_the_lock(
    on: DeviceSet,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    triggers: list[CallbackTrigger],
) -> None:
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs)
    )
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Inner() for _ in range(6))), mlp_batch(rows=8)
    expected = plain_call(model, batch.split(4), batch.loss_fn)
    engine = engines(model, on, compile=True)
    on.check(run_batch(engine, batch, 4), expected.loss, bitwise=False)
    on.check(engine_gradients(engine), expected.gradients, bitwise=False)
    assert set(triggers) == {CallbackTrigger.DYNAMO}


@pytest.mark.parametrize("on", [ONE, TWO], ids=str)
def test_what_cannot_be_compiled_runs_as_it_is(
    on: DeviceSet,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    model = nn.Sequential(*(Inner() for _ in range(4)))
    expected = plain_call(model, BATCH.split(3), BATCH.loss_fn)
    engine = engines(model, on, compile=True)
    for _ in range(2):
        engine.zero_grad()
        on.check(run_batch(engine, BATCH, 3), expected.loss)
        on.check(engine_gradients(engine), expected.gradients)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all("Inner for" in line for line in lines)
    assert (
        len([line for line in lines if "compiling" in line]) == on.count
    )  # one for each device, not for each graph
    assert [line for line in lines if "without being compiled" in line and "no space left" in line]


@pytest.mark.parametrize("kinds", KINDS)
def test_layers_of_many_kinds_are_all_compiled(
    kinds: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense blocks and those with experts, say, or with other masks. Of one piece of code for all
    the compiler would make eight variants, and leave further ones as they are."""
    graphs = []

    def compile_fx(graph: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch.manual_seed(0)
    model = nn.Sequential(Inner(), *KINDS[kinds]())
    expected = plain_call(model, BATCH.split(1), BATCH.loss_fn)
    engine = engines(model, ONE, compile=True)
    ONE.check(run_batch(engine, BATCH, 1), expected.loss)
    ONE.check(engine_gradients(engine), expected.gradients)
    assert len(graphs) == len(model) - 1  # the first is the only one of its class


def test_code_in_cpp_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a compiler for it what queues kernels is Python."""
    tried = []

    def compile_(graph: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        tried.append(config_patches)
        if config_patches.get("cpp_wrapper"):
            raise OSError("no compiler")
        return aot_eager(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_)
    double = torch.compile(lambda x: 2 * x, backend=compiler._Backend("double", in_cpp=True))
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert tried == [{"cpp_wrapper": True}, {}]
    assert not [
        record for record in caplog.records if "without being compiled" in record.getMessage()
    ]


def test_a_call_while_another_thread_compiles_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = WatchedLock()
    monkeypatch.setattr(convert_frame, "compile_lock", lock)
    double = compiler._entered_alone(torch.compile(lambda x: 2 * x, backend="eager"))
    value, results = torch.ones(3), list[Tensor]()
    double(value)
    caller = threading.Thread(target=lambda: results.append(double(value)))
    with monkeypatch.context() as tracing:
        with lock:
            tracing.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)
            lock.is_wanted.clear()
            caller.start()
            assert lock.is_wanted.wait(60)
            tracing.undo()
        caller.join()
    assert [result.tolist() for result in results] == [[2.0, 2.0, 2.0]]


def test_a_call_is_refused_where_the_caller_traces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not tried for ever."""
    double = compiler._entered_alone(torch.compile(lambda x: 2 * x, backend="eager"))
    monkeypatch.setattr("torch.fx._symbolic_trace._is_fx_tracing_flag", True)
    with pytest.raises(RuntimeError, match="symbolically trace"):
        double(torch.ones(3))


def test_what_a_layer_raises_is_not_tried_again() -> None:
    calls = []

    def refuses(value: Tensor) -> Tensor:
        calls.append(value)
        raise RuntimeError("Detected that you are using FX to symbolically trace")

    with pytest.raises(RuntimeError, match="symbolically trace"):
        compiler._entered_alone(torch.compile(lambda x: refuses(x), backend="eager"))(torch.ones(3))
    assert len(calls) == 1


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_compiled_layers_run_hooks_that_come_later(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler takes for granted that a module without hooks gets none."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function, backend="eager"))
    model = nn.Sequential(*(Inner() for _ in range(3)))
    engine = engines(model, compile=True)

    def check() -> None:
        expected = plain_call(model, BATCH.split(2), BATCH.loss_fn)
        engine.zero_grad()
        ONE.check(run_batch(engine, BATCH, 2), expected.loss)
        ONE.check(engine_gradients(engine), expected.gradients)

    check()
    first = model[0].inner.register_forward_hook(double)
    check()
    second = model[1].inner.register_forward_pre_hook(lambda _, args: (3 * args[0],))
    check()
    first.remove()
    check()
    second.remove()
    outer = model[1].register_forward_hook(double)
    check()
    outer.remove()
    check()
