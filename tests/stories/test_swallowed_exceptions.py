"""An exception in a background thread was swallowed and the main thread waited forever.

Here an exception of the user's own type is raised in a layer's forward, backward and recompute, in
`loss_fn` and in `step_fn`; it must reach the caller within 5 s, say where it happened, have had no
effect, and leave an engine that works. The same uncaught in a process of its own must end that
process with a non-zero code.

Source: ludwig-ai/ludwig#3050, meta-pytorch/data#1003.
"""

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe
from tests.support.device_sets import TWO, VIRTUAL, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, Batch, mlp_batch
from tests.support.optimizers import Gate
from tests.support.reference import Tensors, buffers_of, plain_call

PLAN = ModelExecutePlan(
    fwd_plan=[range(1), range(1, 3)], bwd_plan=[range(3, 5), range(1, 3), range(1)]
)
BATCH = mlp_batch(rows=6)
MICROBATCHES = 3
BAD_MICROBATCH = 1


class Boom(Exception):
    """The user's own exception."""


class Trap:
    """Where and when the layers below raise. Global to the test, so that it is found from any copy
    of a layer."""

    def __init__(self) -> None:
        self.where: str | None = None
        self.forwards = 0

    def set(self, where: str | None) -> None:
        self.where = where
        self.forwards = 0

    def spring(self, where: str, hidden: Tensor) -> None:
        if self.where == where and bool(hidden.detach().flatten()[0] > 50):
            raise Boom(f"raised in {where}")


TRAP = Trap()
MARK = 100.0
"""Added to the first element of the microbatch that has to fail, and taken off again by the
layer that looks for it."""


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, hidden: Tensor, marked: Tensor) -> Tensor:
        ctx.save_for_backward(marked)
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        TRAP.spring("backward", ctx.saved_tensors[0])
        return gradient, None


class Trapped(nn.Module):
    """A linear layer that raises where the trap says, for the marked microbatch only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        TRAP.spring("forward", hidden)
        if bool(hidden.detach().flatten()[0] > 50):
            TRAP.forwards += 1
            if TRAP.forwards == 2:
                TRAP.spring("recompute", hidden)
        unmarked = torch.where(hidden > 50, hidden - MARK, hidden)
        return FailingBackward.apply(self.dropout(self.linear(unmarked)), hidden.detach())


class Counting(nn.Module):
    """Passes everything on and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden


def make_model() -> nn.Sequential:
    """Buffers and dropout stand behind the trap and before it: a half-done call would show in
    either."""
    torch.manual_seed(0)
    return nn.Sequential(
        Counting(),
        Trapped(),
        nn.BatchNorm1d(MLP_WIDTH),
        nn.Dropout(0.5),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
    )


def marked_batch() -> Batch:
    """The batch whose second microbatch fails when the trap is set."""
    inputs = BATCH.args[0].clone()
    inputs[BAD_MICROBATCH * len(inputs) // MICROBATCHES, 0] += MARK
    return BATCH._replace(args=(inputs,))


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


class Snapshot:
    """Everything a failed call must leave alone."""

    def __init__(self, engine: RoundPipe) -> None:
        engine.synchronize()
        self.weights = engine_weights(engine)
        self.gradients = engine_gradients(engine)
        self.buffers = buffers_of(engine.model)
        self.generator = torch.get_rng_state()

    def check_unchanged(self, engine: RoundPipe) -> None:
        assert torch.equal(torch.get_rng_state(), self.generator), "the caller's generator moved"
        engine.synchronize()
        TWO.check(engine_weights(engine), self.weights)
        TWO.check(engine_gradients(engine), self.gradients)
        TWO.check(buffers_of(engine.model), self.buffers)


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    if torch.equal(target, BATCH.label.chunk(MICROBATCHES)[BAD_MICROBATCH]):
        raise Boom("raised in loss_fn")
    return BATCH.loss_fn(output, target)


def call(engine: RoundPipe, batch: Batch) -> None:
    """A call whose late part, too, has shown what it has to show."""
    run_batch(engine, batch, MICROBATCHES, execute_plan=PLAN)
    engine.synchronize()


EXPECTED_PASS = {"forward": "forward", "recompute": "backward|recompute", "backward": "backward"}


@pytest.mark.parametrize("devices", VIRTUAL, ids=str)
@pytest.mark.parametrize("where", ["forward", "recompute", "backward", "loss_fn"])
def test_an_error_inside_a_call_arrives_has_no_effect_and_the_next_call_works(
    where: str, devices: DeviceSet, engines: Engines
) -> None:
    """A first call leaves gradients behind; the second fails; the third gives what it gives without
    the second."""
    TRAP.set(None)
    engine, twin = engines(make_model(), devices), engines(make_model(), devices)
    torch.manual_seed(5)
    call(engine, BATCH)
    before = Snapshot(engine)
    TRAP.set(where)
    bad = BATCH._replace(loss_fn=failing_loss) if where == "loss_fn" else marked_batch()
    with pytest.raises(Boom) as caught:
        call(engine, bad)
    assert str(caught.value) == f"raised in {where}"
    assert any(entry.name in ("spring", "failing_loss") for entry in caught.traceback), (
        "the user's frame is gone"
    )
    notes = notes_of(caught.value)
    assert re.search(rf"microbatch\s*{BAD_MICROBATCH}\b", notes), notes
    assert re.search(r"\bdevice\b|virtual", notes), notes
    if where == "loss_fn":
        assert "loss" in notes, notes
    else:
        assert re.search(r"\bstage\s*\d", notes), notes
        assert re.search(EXPECTED_PASS[where], notes), notes
        assert re.search(r"\b1\b|Trapped", notes), f"the layer is not named: {notes}"
    TRAP.set(None)
    before.check_unchanged(engine)

    call(engine, BATCH)
    torch.manual_seed(5)
    call(twin, BATCH)
    call(twin, BATCH)
    devices.check(engine_gradients(engine), engine_gradients(twin))
    devices.check(buffers_of(engine.model), buffers_of(twin.model))


def test_the_trap_itself_is_transparent() -> None:
    """Without a set trap the marked batch is the ordinary one; otherwise the tests above would test
    something else."""
    TRAP.set(None)
    model = make_model().eval()
    for batch in (BATCH, marked_batch()):
        call_result = plain_call(model, batch.split(MICROBATCHES), batch.loss_fn)
        torch.testing.assert_close(
            call_result.outputs[0], model(BATCH.args[0])[:2], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("devices", VIRTUAL, ids=str)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_error_in_step_fn_arrives_and_the_next_step_works(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    """At the call when synchronous, at the first engine call after it when not; nothing was written
    back."""
    TRAP.set(None)
    engine = engines(make_model().eval(), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    call(engine, BATCH)
    gradients, start = engine_gradients(engine), engine_weights(engine)

    def step_fn() -> None:
        raise Boom("raised in step_fn")

    def step_and_call() -> None:
        handle = engine.step(step_fn, is_async=is_async)
        assert is_async, "a synchronous step returned normally"
        handle.wait_over()  # else the call could come before the error
        run_batch(engine, BATCH, MICROBATCHES)

    with pytest.raises(Boom) as caught:
        step_and_call()
    assert any(entry.name == "step_fn" for entry in caught.traceback)
    assert "step" in notes_of(caught.value)
    devices.check(engine_weights(engine), start)
    engine.zero_grad()
    call(engine, BATCH)
    engine.step(optimizer.step, is_async=is_async)
    expected = {
        name: torch.add(value, gradients[name], alpha=-0.1) for name, value in start.items()
    }
    devices.check(engine_weights(engine), expected)


@pytest.mark.parametrize(
    "read", [RoundPipe.synchronize, RoundPipe.state_dict, lambda engine: list(engine.parameters())]
)
def test_an_asynchronous_error_surfaces_at_a_read_too(
    read: Callable[[RoundPipe], object], engines: Engines
) -> None:
    """A save right after the failed step must not quietly write old weights."""
    engine = engines(make_model().eval(), TWO)
    call(engine, BATCH)

    def step_fn() -> None:
        raise Boom("raised in step_fn")

    def step_and_read() -> None:
        engine.step(step_fn)
        read(engine)

    with pytest.raises(Boom):
        step_and_read()


def test_the_handle_of_a_failed_step_raises_its_error(engines: Engines) -> None:
    engine = engines(make_model().eval(), TWO)
    call(engine, BATCH)
    # The very first step waits until its optimizer was entered, so that one must not be the one
    # held up.
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    engine.step(optimizer.step)
    call(engine, BATCH)
    gate = Gate()

    def step_fn() -> None:
        gate.pause()
        raise Boom("raised in step_fn")

    handle = engine.step(step_fn)
    gate.open()
    with pytest.raises(Boom):
        handle.result()
    with suppress(
        Boom
    ):  # Whether the handle's caller has "seen" it, so that nothing is left to raise, is left open.
        engine.close()


LATE = Gate()


class LateFailure(torch.autograd.Function):
    """Fails in a backward held up until the call has returned."""

    @staticmethod
    def forward(ctx: object, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        if TRAP.where == "late":
            LATE.pause()
            raise Boom("raised in a late backward")
        return gradient


class FailsLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return LateFailure.apply(self.linear(hidden))


@pytest.mark.parametrize("devices", VIRTUAL, ids=str)
def test_a_failure_after_the_call_returned_cancels_the_step_that_waits_for_it(
    devices: DeviceSet, engines: Engines
) -> None:
    """The losses are known, so the call returned; its gradients are dropped with the step, the
    weights stay."""
    global LATE
    LATE = Gate()
    TRAP.set(None)
    torch.manual_seed(0)
    model = nn.Sequential(FailsLate(), nn.Tanh(), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    engine = engines(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    plan = ModelExecutePlan(fwd_plan=[range(2)], bwd_plan=[range(2, 3), range(2)])
    stepped = []

    def step_fn() -> None:
        stepped.append(True)
        optimizer.step()
        optimizer.zero_grad()

    # The very first step with an optimizer waits until it was entered, so that one must not be the
    # one held up.
    run_batch(engine, BATCH, MICROBATCHES, execute_plan=plan)
    engine.step(step_fn, is_async=False)
    start = engine_weights(engine)
    TRAP.set("late")
    run_batch(
        engine, BATCH, MICROBATCHES, execute_plan=plan
    )  # Returns, or the gate ends the wait with TimeoutError.
    engine.step(step_fn)
    LATE.open()
    with pytest.raises(Boom):
        engine.synchronize()
    TRAP.set(None)
    assert stepped == [True], "the step ran on gradients that never offloaded"
    devices.check(engine_weights(engine), start)
    expected = plain_call(make_copy(model, start), BATCH.split(MICROBATCHES), BATCH.loss_fn)
    run_batch(engine, BATCH, MICROBATCHES, execute_plan=plan)
    devices.check(engine_gradients(engine), expected.gradients)


def make_copy(model: nn.Module, weights: Tensors) -> nn.Module:
    """A plain model with these weights, sharing nothing."""
    twin = nn.Sequential(FailsLate(), nn.Tanh(), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    assert [type(layer) for layer in twin] == [type(layer) for layer in model]
    twin.load_state_dict(weights)
    return twin


SCRIPT = """
    import torch
    from torch import nn
    import roundpipe


    class UsersOwnError(Exception):
        pass


    class Layer(nn.Linear):
        def forward(self, hidden):
            if {in_layer}:
                raise UsersOwnError("from the layer")
            return super().forward(hidden)


    def step_fn():
        raise UsersOwnError("from step_fn")


    engine = roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4), Layer(4, 4)), devices=2)
    for _ in range(2):
        engine.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, _: output.sum())
        engine.step(step_fn)
    engine.synchronize()
    print("not reached")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["layer", "step_fn"])
def test_an_uncaught_error_ends_the_process_with_a_code_and_a_traceback(where: str) -> None:
    """No thread of the engine keeps the interpreter alive, though nobody closed it."""
    script = textwrap.dedent(SCRIPT).format(in_layer=where == "layer")
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 1, process.stderr
    assert (
        "UsersOwnError" in process.stderr.strip().splitlines()[-1]
        or "UsersOwnError: from" in process.stderr
    )
    assert f"from {'the layer' if where == 'layer' else 'step_fn'}" in process.stderr
    assert "not reached" not in process.stdout


@pytest.mark.slow
def test_a_process_that_never_closes_its_engine_ends_by_itself() -> None:
    script = textwrap.dedent(
        """
        import torch
        from torch import nn
        import roundpipe

        engine = roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), devices=3)
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        for _ in range(3):
            engine.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, _: output.sum())
            engine.step(optimizer.step)
        print("done")
        """
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (process.returncode, process.stdout.strip(), process.stderr) == (0, "done", "")


def test_many_failures_in_a_row_leave_a_working_engine(engines: Engines) -> None:
    """Each kind after the other on one engine: a leaked lock, ticket or slot would stop it soon."""
    engine = engines(make_model().eval(), TWO)
    TRAP.set(None)
    call(engine, BATCH)
    expected = engine_gradients(engine)
    failures: list[Callable[[], None]] = [
        lambda: call(engine, marked_batch()),
        lambda: call(engine, BATCH._replace(loss_fn=failing_loss)),
    ]
    for number in range(12):
        TRAP.set(("forward", "recompute", "backward")[number % 3])
        with pytest.raises(Boom):
            failures[number % 2]()
        TRAP.set(None)
        engine.zero_grad()
        call(engine, BATCH)
        TWO.check(engine_gradients(engine), expected)
