"""One error at every kind of action: it arrives, has no effect, leaves nothing behind, and the next
call is right."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from roundpipe import RoundPipe
from roundpipe.params.working import LayerParameters
from roundpipe.step import write_back
from roundpipe.step.write_back import WriteBack
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_gradients, engine_weights
from tests.support.injection import (
    INJECTION,
    LATE_SITES,
    SITES,
    Boom,
    HookedDevices,
    State,
    call,
    call_only,
    check_held,
    held,
    make_hooked_model,
    raise_boom,
)
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import buffers_of

COUNTS = [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)), 3]


@pytest.fixture(autouse=True)
def _nothing_left_armed() -> None:
    INJECTION.disarm()


def make_engine(
    engines: Engines, count: int, dropout: float, for_site: str | None = None
) -> RoundPipe:
    """An engine that has learnt its layers, and has gradients that must survive."""
    engine = engines(make_hooked_model(dropout), HookedDevices(count, for_site))  # type: ignore[arg-type]
    torch.manual_seed(5)
    for _ in range(count + 1):  # until every stage has visited every device
        call(engine)
    return engine


def fail(engine: RoundPipe, site: str) -> None:
    """In a function of its own, because a kept exception keeps the tensors of its frames."""
    INJECTION.arm(site, raise_boom)
    with pytest.raises(Boom, match="injected"):
        call(engine)
    assert not INJECTION.is_armed


def check_no_fault(engine: RoundPipe) -> None:
    """Nothing went on behind the failure: no copy into memory that had gone back."""
    assert [fault for device in engine.devices for fault in getattr(device, "faults", [])] == []


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("site", SITES)
def test_a_failed_call_has_no_effect(site: str, count: int, engines: Engines) -> None:
    """With dropout a call returns after its last stage run, so that every failure is a failure of
    the call itself."""
    twin = make_engine(engines, count, 0.3, site)
    call(twin)
    engine = make_engine(engines, count, 0.3, site)
    before, memory = State(engine), held(engine)
    fail(engine, site)
    after = State(engine)
    assert torch.equal(after.generator, before.generator), "the caller's generator moved"
    assert after.threads == before.threads
    ONE.check(after.weights, before.weights)
    ONE.check(after.gradients, before.gradients)
    ONE.check(after.buffers, before.buffers)
    del after
    gc.collect()  # what only the error kept alive may be gone before the next call
    call(engine)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    ONE.check(buffers_of(engine.model), buffers_of(twin.model))
    check_held(engine, memory)
    check_no_fault(engine)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("site", LATE_SITES)
def test_a_late_failure_drops_the_gradients_of_its_call_only(
    site: str, count: int, engines: Engines
) -> None:
    """The call has returned its losses; the error is raised at the next engine call."""
    twin = make_engine(engines, count, 0.0)
    call(twin)
    engine = make_engine(engines, count, 0.0)
    before, memory = State(engine), held(engine)
    fail(engine, site)
    after = State(engine)
    assert torch.equal(after.generator, before.generator), "the caller's generator moved"
    assert after.threads == before.threads
    ONE.check(after.weights, before.weights)
    ONE.check(after.gradients, before.gradients)
    del after
    gc.collect()  # what only the error kept alive may be gone before the next call
    call(engine)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    check_held(engine, memory)
    check_no_fault(engine)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("site", LATE_SITES)
def test_a_step_whose_gradients_failed_late_is_cancelled(
    site: str, count: int, engines: Engines
) -> None:
    """Not even gradients of the calls before may be applied: they were half of what the step was to
    use."""
    engine = make_engine(engines, count, 0.0)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    engine.step(optimizer.step, is_async=False)
    before = State(engine)

    def train() -> None:
        call(engine)
        INJECTION.arm(site, raise_boom)
        with pytest.raises(Boom, match="injected"):
            call_and_step(engine, optimizer)

    train()
    engine.zero_grad()
    ONE.check(engine_weights(engine), before.weights)
    call(engine)
    assert engine_gradients(engine)


def call_and_step(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    call_only(engine)
    engine.step(optimizer.step, is_async=True)
    engine.synchronize()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("site", LATE_SITES)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_step_after_the_error_was_raised_is_not_cancelled(
    is_async: bool, site: str, count: int, engines: Engines
) -> None:
    """The caller has seen the error and goes on: a step that then quietly did nothing would be a
    lie."""
    engine, twin = make_engine(engines, count, 0.0), make_engine(engines, count, 0.0)
    fail(engine, site)
    for one in (engine, twin):
        call(one)
        optimizer = torch.optim.SGD(one.optim_parameters(), lr=0.1)
        one.step(optimizer.step, is_async=is_async)
    ONE.check(engine_weights(engine), engine_weights(twin))


# Writing back. Its error is injected where masters are written to working copies, which no user
# code takes part in.


@contextmanager
def failing_to_write_back(layer: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = WriteBack._write

    def failing(self: WriteBack, layers: list[LayerParameters], *rest: Any, **more: Any) -> Any:
        if layers[0].layer == layer:
            INJECTION.reach("write_back")
        return real(self, layers, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(write_back, "_TOGETHER_BYTES", 0)
        patch.setattr(WriteBack, "_write", failing)
        yield
        assert not INJECTION.is_armed


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layer", [0, 6])
@pytest.mark.parametrize("then", ["read", "call"])
def test_an_update_that_could_not_be_written_back_is_written_back_later(
    then: str, layer: int, count: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masters have it. Whatever comes next raises the error once, also if it waits for those
    very weights."""
    engine, twin = make_engine(engines, count, 0.0), make_engine(engines, count, 0.0)
    optimizers = [torch.optim.SGD(one.optim_parameters(), lr=0.1) for one in (engine, twin)]
    twin.step(optimizers[1].step, is_async=False)
    twin.synchronize()

    def step_fn() -> None:
        optimizers[0].step()
        optimizers[0].zero_grad()
        INJECTION.arm("write_back", raise_boom, at=1)

    with failing_to_write_back(layer, monkeypatch), pytest.raises(Boom, match="injected"):
        step_and_go_on(engine, step_fn, then, is_async=False)
    if then == "call":
        call(engine)
        call(twin)
        ONE.check(engine_gradients(engine), engine_gradients(twin))
    ONE.check(engine_weights(engine), engine_weights(twin))
    check_no_fault(engine)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layer", [0, 6])
def test_an_asynchronous_step_that_cannot_write_back_the_one_before_is_cancelled(
    layer: int, count: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that waits for those weights fails instead of waiting forever; the step before is
    not lost."""
    engine, twin = make_engine(engines, count, 0.0), make_engine(engines, count, 0.0)
    optimizers = [torch.optim.SGD(one.optim_parameters(), lr=0.1) for one in (engine, twin)]
    for one, optimizer in zip((engine, twin), optimizers, strict=True):
        one.step(optimizer.step).wait()
        call_only(one)
    INJECTION.arm("write_back", raise_boom, at=1)
    with failing_to_write_back(layer, monkeypatch), pytest.raises(Boom, match="injected"):
        step_and_go_on(engine, optimizers[0].step, "call", is_async=True)
    ONE.check(engine_weights(engine), engine_weights(twin))
    for one in (engine, twin):
        one.zero_grad()
        call(one)
    ONE.check(engine_gradients(engine), engine_gradients(twin))


def step_and_go_on(
    engine: RoundPipe, step_fn: Callable[[], object], then: str, *, is_async: bool
) -> None:
    engine.step(step_fn, is_async=is_async)
    if then == "call":
        call_only(engine)
    engine.synchronize()


def test_gradients_on_their_way_down_keep_their_memory_when_another_device_fails(
    engines: Engines,
) -> None:
    """The fused stage's device is done, its copies are not: what they write to may be given up only
    after them."""
    engine = make_engine(engines, 3, 0.3)
    offloaded = threading.Event()
    count_landings(engine, offloaded)
    INJECTION.arm("backward", lambda: raise_boom() if offloaded.wait(PATIENCE_S) else None, at=3)
    with suppress(Boom):
        call(engine)
    assert offloaded.is_set()
    gc.collect()
    call(engine)
    check_no_fault(engine)


def count_landings(engine: RoundPipe, offloaded: threading.Event) -> None:
    """Sets the event when the gradients of the fused stage have all been queued."""
    counts = (len(list(layer.parameters())) for layer in list(engine.model.children())[4:])
    left = sum(count + 1 for count in counts if count)  # each layer's norms go down too
    for device in engine.devices:
        copy_ = device.down.copy_

        def counted(
            target: torch.Tensor, source: torch.Tensor, copy_: Callable[..., None] = copy_
        ) -> None:
            nonlocal left
            copy_(target, source)
            left -= 1
            if left == 0:
                offloaded.set()

        device.down.copy_ = counted  # type: ignore[method-assign]
