"""RoundPipe's own optimizers only decide in `step()`; the update is computed later, and nobody can
tell.

Each test looks at masters, state or gradients in some way between `optimizer.step()` and the end of
`step_fn`, or right after a synchronous step, and must find what torch's optimizer gives on the
plain model, to the bit. Layers are 16 wide: whole vectors, which torch's kernels and the engine's
compute alike.
"""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import roundpipe
from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.autoplan.planner import Planner
from roundpipe.kernels import native, updates
from roundpipe.params.placement.held import Held
from roundpipe.step import write_back
from roundpipe.step.write_back import WriteBack
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, reference_steps, run_batch, train_steps
from tests.support.models import make_mlp, mlp_batch
from tests.support.reference import Reference, plain_call

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(6)]
ONE_STAGE = ModelExecutePlan([], [range(7)])
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
Optimizer = torch.optim.Optimizer


def plain_adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, fused=True, **SETTINGS)


def adamw(engine: RoundPipe) -> Optimizer:
    return roundpipe.optim.AdamW(engine.optim_parameters(), **SETTINGS)


class Plain:
    """The plain model and its optimizer after one step, and after two with the same gradients."""

    def __init__(self) -> None:
        self.model = make_mlp()
        self.optimizer = plain_adamw(self.model.parameters())
        self.step()

    def step(self) -> None:
        gradients = plain_call(make_mlp(), BATCHES[0].split(2), BATCHES[0].loss_fn).gradients
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    def state(self, key: str) -> list[Tensor]:
        return [self.optimizer.state[parameter][key] for parameter in self.model.parameters()]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0)


def masters_of(optimizer: Optimizer) -> list[Tensor]:
    return [master for group in optimizer.param_groups for master in group["params"]]


def one_step(engine: RoundPipe, step_fn: Callable[[], Any], *, is_async: bool) -> Any:
    run_batch(engine, BATCHES[0], 2)
    return engine.step(step_fn, is_async=is_async)


def one_step_and_synchronize(
    engine: RoundPipe, step_fn: Callable[[], Any], *, is_async: bool
) -> None:
    one_step(engine, step_fn, is_async=is_async)
    engine.synchronize()


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@both
def test_the_update_is_pending_until_step_fn_is_over(is_async: bool, engines: Engines) -> None:
    """So the tests below test something; `step` counters are the optimizer's own and up to date at
    once."""
    engine = engines(make_mlp(), TWO)
    optimizer = adamw(engine)

    def step_fn() -> list[bool]:
        optimizer.step()
        assert {float(optimizer.state[master]["step"]) for master in masters_of(optimizer)} == {1.0}
        return [isinstance(master, Held) for master in masters_of(optimizer)]

    assert all(one_step(engine, step_fn, is_async=is_async).result())
    with OptimizerCtx():
        assert not any(isinstance(master, Held) for master in masters_of(optimizer))
    assert_equal(masters_of(optimizer), Plain().weights)


LOOKS: dict[str, Callable[[Optimizer], list[Tensor]]] = {
    "masters": lambda optimizer: [master.detach().clone() for master in masters_of(optimizer)],
    "moments": lambda optimizer: [
        optimizer.state[master]["exp_avg_sq"] * 1 for master in masters_of(optimizer)
    ],
    "state_dict": lambda optimizer: [
        s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()
    ],
    "gradients": lambda optimizer: [master.grad for master in masters_of(optimizer)],
}


@both
@pytest.mark.parametrize("look", LOOKS)
def test_step_fn_sees_its_update(
    look: str, is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make_mlp(), devices)
    optimizer = adamw(engine)

    def step_fn() -> list[Tensor]:
        optimizer.step()
        return LOOKS[look](optimizer)

    seen = one_step(engine, step_fn, is_async=is_async).result()
    plain = Plain()
    expected = {
        "masters": plain.weights,
        "moments": plain.state("exp_avg_sq"),
        "state_dict": plain.state("exp_avg"),
        "gradients": [parameter.grad for parameter in plain.model.parameters()],
    }[look]
    names = [name for name, _ in plain.model.named_parameters()]
    devices.check(dict(zip(names, seen, strict=True)), dict(zip(names, expected, strict=True)))
    devices.check(engine_weights(engine), dict(zip(names, plain.weights, strict=True)))


def test_views_taken_before_show_the_update(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = adamw(engine)
    views = [master.detach().view(-1) for master in engine.optim_parameters()]

    def step_fn() -> list[Tensor]:
        optimizer.step()
        return [view.clone() for view in views]

    seen = one_step(engine, step_fn, is_async=False).result()
    assert_equal(seen, [weight.view(-1) for weight in Plain().weights])


def test_hooks_after_the_step_see_it(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = adamw(engine)
    seen = []
    optimizer.register_step_post_hook(
        lambda optimizer, *_: seen.extend(
            master.detach().clone() for master in masters_of(optimizer)
        )
    )
    one_step(engine, optimizer.step, is_async=False)
    assert_equal(seen, Plain().weights)


def test_two_steps_in_one_step_fn(engines: Engines) -> None:
    engine = engines(make_mlp(), TWO)
    optimizer = adamw(engine)

    def step_fn() -> None:
        optimizer.step()
        optimizer.step()

    one_step(engine, step_fn, is_async=False)
    plain = Plain()
    plain.step()
    assert_equal(list(engine_weights(engine).values()), plain.weights)


@pytest.mark.parametrize("own", [True, False], ids=["ours", "torch's"])
def test_another_optimizer_over_the_same_masters_builds_on_the_update(
    own: bool, engines: Engines
) -> None:
    engine = engines(make_mlp(), ONE)
    first = adamw(engine)
    second = (roundpipe.optim.SGD if own else torch.optim.SGD)(engine.optim_parameters(), lr=0.1)

    def step_fn() -> None:
        first.step()
        second.step()

    one_step(engine, step_fn, is_async=False)
    plain = Plain()
    torch.optim.SGD(plain.model.parameters(), lr=0.1, fused=own).step()
    assert_equal(list(engine_weights(engine).values()), plain.weights)


def test_optimizers_over_a_share_of_the_masters_each(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    masters = engine.optim_parameters()
    optimizers = [roundpipe.optim.AdamW(masters[start::2], **SETTINGS) for start in (0, 1)]

    def step_fn() -> None:
        for optimizer in optimizers:
            optimizer.step()

    one_step(engine, step_fn, is_async=True)
    assert_equal(list(engine_weights(engine).values()), Plain().weights)


def test_a_closure_runs_before_the_update(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer = adamw(engine)
    seen: list[Tensor] = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        seen.extend(master.detach().clone() for master in masters_of(optimizer))
        return 7.0

    assert one_step(engine, lambda: optimizer.step(closure), is_async=False).result() == 7.0
    assert_equal(seen, [parameter.detach() for parameter in make_mlp().parameters()])
    assert_equal(masters_of(optimizer), Plain().weights)


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
def test_gradients_zeroed_right_after_the_step_were_used(reads: bool, engines: Engines) -> None:
    """`set_to_none=False` writes zeros where somebody has made `.grad`, which the update must have
    read by then."""
    engine = engines(make_mlp(), ONE)
    optimizer = adamw(engine)

    def step_fn() -> None:
        if reads:
            torch.nn.utils.clip_grad_norm_(engine.parameters(), 1e6)
        optimizer.step()
        for master in masters_of(optimizer):
            if reads:
                master.grad.zero_()
            else:
                master.grad = None

    one_step(engine, step_fn, is_async=False)
    assert_equal(masters_of(optimizer), Plain().weights)


@both
def test_after_an_error_the_masters_have_the_update_and_nothing_is_written_back(
    is_async: bool, engines: Engines
) -> None:
    """As in torch: what `optimizer.step()` was asked to do is done, whatever is raised
    afterwards."""
    engine = engines(make_mlp(), TWO)
    optimizer = adamw(engine)

    def step_fn() -> None:
        optimizer.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one_step_and_synchronize(engine, step_fn, is_async=is_async)
    assert_equal(masters_of(optimizer), Plain().weights)
    assert_equal(list(engine_weights(engine).values()), list(make_mlp().parameters()))


def test_the_caller_sees_a_synchronous_update_at_once(devices: DeviceSet, engines: Engines) -> None:
    """In whatever he holds: masters, state, views."""
    engine = engines(make_mlp(), devices)
    optimizer, plain = adamw(engine), Plain()
    names = [name for name, _ in plain.model.named_parameters()]
    masters = list(engine.optim_parameters())
    one_step(engine, optimizer.step, is_async=False)
    seen = [master.detach().clone() for master in masters]
    moments = [optimizer.state[master]["exp_avg"] + 0 for master in masters]
    devices.check(dict(zip(names, seen, strict=True)), dict(zip(names, plain.weights, strict=True)))
    devices.check(
        dict(zip(names, moments, strict=True)),
        dict(zip(names, plain.state("exp_avg"), strict=True)),
    )


def test_a_forward_overlaps_the_rest_of_a_synchronous_update(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of the last layer begins only when the first layer has been seen to run the next
    call."""
    real, ran = WriteBack._write, threading.Event()
    waited: list[bool] = []

    def write_back_last_late(self: WriteBack, layers: Any, *rest: Any, **more: Any) -> list[int]:
        if layers[0].layer == 6 and is_stepped:
            waited.append(ran.wait(20))
        return real(self, layers, *rest, **more)

    monkeypatch.setattr(write_back, "_TOGETHER_BYTES", 0)
    monkeypatch.setattr(WriteBack, "_write", write_back_last_late)
    is_stepped = False
    model, reference = make_mlp(), Reference(make_mlp(), plain_adamw)
    expected = reference_steps(reference, BATCHES[:2], 2)
    engine = engines(model, ONE)
    optimizer = adamw(engine)
    plan = roundpipe.ModelExecutePlan(
        fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 7), range(2, 4), range(2)]
    )
    losses = [run_batch(engine, BATCHES[0], 2, execute_plan=plan)]
    is_stepped = True
    model[0].register_forward_hook(lambda *_: ran.set())
    engine.step(optimizer.step, is_async=False)
    losses.append(run_batch(engine, BATCHES[1], 2, execute_plan=plan))
    is_stepped = False
    engine.step(optimizer.step, is_async=False)
    assert waited == [True]
    ONE.check(torch.stack(losses), torch.stack(expected))
    ONE.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_overlap_changes_no_bit(kind: str, devices: DeviceSet, engines: Engines) -> None:
    """A flush after every step leaves nothing to overlap."""

    def train(flushes: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        config = RoundPipeRunConfig(
            execute_plan=ONE_STAGE
        )  # a GPU's plan may depend on what was measured
        engine = engines(
            make_mlp().bfloat16(), devices, optim_dtype=torch.float32, model_run_config=config
        )
        optimizer = getattr(roundpipe.optim, kind)(engine.optim_parameters(), lr=0.01)
        losses = []
        for batch in BATCHES:
            batch = batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16())
            losses += train_steps(engine, optimizer, [batch], 2, is_async=False)
            if flushes:
                engine.synchronize()
        engine.synchronize()
        with OptimizerCtx():
            masters = {name: master.detach().clone() for name, master in engine.named_parameters()}
        return losses, masters | {
            f"working {name}": value for name, value in engine_weights(engine).items()
        }

    (losses, weights), (expected, expected_weights) = train(flushes=False), train(flushes=True)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(weights, expected_weights)


def test_a_shape_does_not_force_the_update(engines: Engines) -> None:
    engine = engines(nn.Sequential(nn.Linear(16, 16)), ONE)
    optimizer = adamw(engine)

    def step_fn() -> bool:
        optimizer.step()
        optimizer.zero_grad()
        engine.optim_parameters()
        sum(master.numel() for master in masters_of(optimizer))
        return all(isinstance(master, Held) for master in masters_of(optimizer))

    assert one_step(engine, step_fn, is_async=False).result()


class Operations(TorchDispatchMode):
    """Counts the operations that torch is asked for: after each, the interpreter has to be waited
    for again."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "LeanAdamW"])
def test_deciding_takes_no_more_operations_for_more_parameters(kind: str, engines: Engines) -> None:
    """The optimizer thread shares the interpreter with the threads that feed the devices."""
    counts = []
    for num_linears in (2, 9):
        engine = engines(make_mlp(num_linears), ONE)
        optimizer = getattr(roundpipe.optim, kind)(engine.optim_parameters(), lr=0.01)
        scaler = roundpipe.GradScaler(init_scale=4.0)

        def step_fn(optimizer: Optimizer = optimizer, scaler: roundpipe.GradScaler = scaler) -> int:
            with Operations() as operations:
                scaler.unscale_(optimizer)
                roundpipe.clip_grad_norm_(optimizer, 0.1)
                scaler.step(optimizer)
                optimizer.zero_grad()
            return operations.count

        batch = BATCHES[0]
        batch = batch._replace(
            loss_fn=lambda out, y, of=batch.loss_fn, scaler=scaler: scaler.scale(of(out, y))
        )
        for _ in range(2):  # the first makes the state
            run_batch(engine, batch, 1)
            counts.append(engine.step(step_fn, is_async=False).result())
            scaler.update()
    assert counts[1] == counts[3]


@both
@pytest.mark.parametrize("together", [0, 1 << 30])
def test_a_layer_is_one_call_of_the_kernel_or_many_small_ones_are(
    together: int, is_async: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.library() is None:
        pytest.skip("this machine has no C compiler")
    monkeypatch.setattr(write_back, "_TOGETHER_BYTES", together)
    jobs: list[int] = []
    by_kernel = updates._by_kernel
    monkeypatch.setattr(
        updates, "_by_kernel", lambda some: (jobs.append(len(some)), by_kernel(some))[1]
    )
    engine = engines(make_mlp(), TWO)
    optimizer = adamw(engine)
    for _ in range(2):  # the second has another working copy to write to
        jobs.clear()
        one_step_and_synchronize(engine, optimizer.step, is_async=is_async)
        linears = [module for module in engine.model if isinstance(module, nn.Linear)]
        assert jobs == ([2 * len(linears)] if together else [2] * len(linears))


@both
@pytest.mark.parametrize("place", ["host", "device"])
def test_an_update_that_cannot_be_computed_keeps_no_other_from_being_done(
    place: str, is_async: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small layers are updated together. Hyper-parameters of a group of its own are checked by
    nobody."""
    monkeypatch.setattr(
        Planner, "hides_update", lambda *_: False
    )  # because then there are no device states
    settings = {"max_gpu_memory": 1.0} if place == "device" else {}

    def make(**of_two_layers: Any) -> tuple[RoundPipe, Optimizer]:
        engine = engines(make_mlp(), ONE, **settings)
        named = engine.optim_named_parameters()
        two, others = (
            [master for name, master in named if (name[0] in "24") is own] for own in (True, False)
        )
        optimizer = roundpipe.optim.AdamW([{"params": two}, {"params": others}], **SETTINGS)
        for _ in range(3):
            one_step(engine, optimizer.step, is_async=is_async)
        engine.synchronize()
        optimizer.param_groups[0] |= of_two_layers
        return engine, optimizer

    (engine, optimizer), (twin, twins) = make(betas=(1.0, 0.999)), make(lr=0.0)
    assert bool(engine.statistics()["device_state_bytes"]) is (place == "device")
    for _ in range(2):  # the second has another working copy to write to
        with pytest.raises(ZeroDivisionError):
            one_step_and_synchronize(engine, optimizer.step, is_async=is_async)
        one_step_and_synchronize(twin, twins.step, is_async=is_async)
        ONE.check(engine_weights(engine), engine_weights(twin))
        ONE.check(dict(engine.optim_named_parameters()), dict(twin.optim_named_parameters()))


@both
def test_small_layers_do_not_wait_for_the_update_of_a_large_one_behind_them(
    is_async: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what the next forward needs first. Beside an asynchronous update no forward waits
    for it, but the next call's gradients come, deep layers first."""
    marked: list[list[int]] = []
    mark = WriteBack._mark

    def listening(self: WriteBack, layers: Iterable[int], version: int) -> None:
        marked.append(sorted(layers))
        mark(self, marked[-1], version)

    widths = [(16, 16), (16, 16), (16, 256), (256, 16), (16, 16)]
    engine = engines(nn.Sequential(*(nn.Linear(*each) for each in widths)), ONE)
    optimizer = adamw(engine)
    for _ in range(2):  # the second has another working copy to write to
        one_step_and_synchronize(engine, optimizer.step, is_async=is_async)
    monkeypatch.setattr(write_back, "_TOGETHER_BYTES", 3 * 4 * 16 * 17)
    monkeypatch.setattr(WriteBack, "_mark", listening)
    one_step(engine, optimizer.step, is_async=is_async)
    engine._steps.wait_idle()
    in_order = [[0, 1], [2], [3], [4]]
    assert [layers for layers in marked if layers] == (in_order[::-1] if is_async else in_order)
