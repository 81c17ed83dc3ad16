"""Ctrl-C while an action hangs: it arrives, the call has no effect, nothing is left behind, the
next call is right."""

import gc
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
    PLAN,
    SITES,
    HookedDevices,
    Interruption,
    State,
    call,
    call_only,
    check_held,
    held,
    make_hooked_model,
)
from tests.support.reference import buffers_of

COUNTS = [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)), 3]


@pytest.fixture(autouse=True)
def _nothing_left_armed() -> None:
    INJECTION.disarm()


def make_engine(
    engines: Engines, count: int, dropout: float, for_site: str | None = None
) -> RoundPipe:
    engine = engines(make_hooked_model(dropout), HookedDevices(count, for_site))  # type: ignore[arg-type]
    torch.manual_seed(5)
    for _ in range(count + 1):  # until every stage has visited every device
        call(engine)
    return engine


def make_trained(engines: Engines, count: int) -> tuple[RoundPipe, torch.optim.Optimizer]:
    engine = make_engine(engines, count, 0.0)
    return engine, torch.optim.SGD(engine.optim_parameters(), lr=0.1)


def interrupt(engine: RoundPipe, site: str) -> None:
    with Interruption() as interruption:
        INJECTION.arm(site, interruption.hang)
        with pytest.raises(KeyboardInterrupt):
            call(engine)
        assert interruption.has_arrived


def check_no_fault(engine: RoundPipe) -> None:
    assert [fault for device in engine.devices for fault in getattr(device, "faults", [])] == []


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("site", SITES)
def test_an_interrupted_call_has_no_effect(site: str, count: int, engines: Engines) -> None:
    """With dropout a call returns after its last stage run, so that every interrupt meets the call
    itself."""
    twin = make_engine(engines, count, 0.3, site)
    call(twin)
    engine = make_engine(engines, count, 0.3, site)
    before, memory = State(engine), held(engine)
    interrupt(engine, site)
    after = State(engine)
    assert torch.equal(after.generator, before.generator), "the caller's generator moved"
    assert after.threads == before.threads
    ONE.check(after.weights, before.weights)
    ONE.check(after.gradients, before.gradients)
    ONE.check(after.buffers, before.buffers)
    del after
    gc.collect()
    call(engine)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    ONE.check(buffers_of(engine.model), buffers_of(twin.model))
    check_held(engine, memory)
    check_no_fault(engine)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("site", LATE_SITES)
def test_an_interrupted_wait_leaves_what_it_waited_for(
    site: str, count: int, engines: Engines
) -> None:
    """The call has returned: it is `synchronize` that is interrupted, and the call's gradients
    arrive all the same."""
    engine, twin = make_engine(engines, count, 0.0), make_engine(engines, count, 0.0)
    memory = held(engine, twin)
    with Interruption(is_allowed=False) as interruption:
        INJECTION.arm(
            site,
            interruption.hang,
            at=2 if site != "offloading" else 1 + offloaded_by_the_fused_stage(engine),
        )
        call_only(engine)
        with pytest.raises(KeyboardInterrupt):
            allow_and_synchronize(engine, interruption)
    call(twin)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    for one in (engine, twin):
        call(one)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    check_held(engine, memory, twin)
    check_no_fault(engine)


def offloaded_by_the_fused_stage(engine: RoundPipe) -> int:
    """Its gradients go down before the losses are announced; the next one belongs to a late stage
    run."""
    counts = (len(list(engine.model[layer].parameters())) for layer in PLAN.bwd_plan[0])  # type: ignore[index]
    return sum(count + 1 for count in counts if count)  # each layer's norms go down too


def allow_and_call(engine: RoundPipe, interruption: Interruption) -> None:
    interruption.allow()
    call_only(engine)


def allow_and_synchronize(engine: RoundPipe, interruption: Interruption) -> None:
    interruption.allow()
    engine.synchronize()


@pytest.mark.parametrize("count", COUNTS)
def test_a_synchronous_step_is_interrupted_after_the_update(count: int, engines: Engines) -> None:
    """Never half of it."""
    (engine, optimizer), (twin, twins) = make_trained(engines, count), make_trained(engines, count)
    twin.step(twins.step, is_async=False)
    with Interruption() as interruption:

        def step_fn() -> None:
            interruption.hang()
            optimizer.step()
            optimizer.zero_grad()

        with pytest.raises(KeyboardInterrupt):
            engine.step(step_fn, is_async=False)
        assert interruption.has_arrived
    ONE.check(engine_weights(engine), engine_weights(twin))
    for one in (engine, twin):
        call(one)
    ONE.check(engine_gradients(engine), engine_gradients(twin))


@pytest.mark.parametrize("count", COUNTS)
def test_a_call_that_waits_for_an_update_can_be_interrupted(count: int, engines: Engines) -> None:
    """Two asynchronous steps are taken and the first one hangs: the call needs its weights. Both
    steps still count."""
    (engine, optimizer), (twin, twins) = make_trained(engines, count), make_trained(engines, count)
    for one, its in ((engine, optimizer), (twin, twins)):
        # A first step returns only when it is known what it steps.
        one.step(its.step, is_async=False)
        call(one)
    with Interruption(is_allowed=False) as interruption:
        hangs = iter([interruption.hang])

        def step_fn() -> None:
            next(hangs, lambda: None)()
            optimizer.step()
            optimizer.zero_grad()

        engine.step(step_fn)
        call_only(engine)
        engine.step(step_fn)
        with pytest.raises(KeyboardInterrupt):
            allow_and_call(engine, interruption)
    twin.step(twins.step)
    call_only(twin)
    twin.step(twins.step)
    ONE.check(engine_weights(engine), engine_weights(twin))
    assert engine_gradients(engine) == {}
    for one in (engine, twin):
        call(one)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    check_no_fault(engine)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layer", [0, 6])
def test_a_call_that_waits_for_writing_back_can_be_interrupted(
    layer: int, count: int, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine, optimizer), (twin, twins) = make_trained(engines, count), make_trained(engines, count)
    real = WriteBack._write

    def hanging(self: WriteBack, layers: list[LayerParameters], *rest: Any, **more: Any) -> Any:
        if layers[0].layer == layer:
            INJECTION.reach("write_back")
        return real(self, layers, *rest, **more)

    with Interruption() as interruption, monkeypatch.context() as patch:
        patch.setattr(write_back, "_TOGETHER_BYTES", 0)
        patch.setattr(WriteBack, "_write", hanging)
        INJECTION.arm("write_back", interruption.hang, at=1)
        with pytest.raises(KeyboardInterrupt):
            step_and_call(engine, optimizer)
        assert interruption.has_arrived
    twin.step(twins.step, is_async=False)
    ONE.check(engine_weights(engine), engine_weights(twin))
    for one in (engine, twin):
        call(one)
    ONE.check(engine_gradients(engine), engine_gradients(twin))
    check_no_fault(engine)


def step_and_call(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    engine.step(optimizer.step, is_async=False)
    call(engine)
