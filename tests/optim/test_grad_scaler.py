"""roundpipe.GradScaler gives the scales, skips and weights of torch's own on a plain model;
asynchronous steps give those of a written reference in which a step's findings take effect one
`update()` later.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, GradScaler, RoundPipe
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import Batch, make_mlp, mlp_batch
from tests.support.optimizers import PausingSGD, every_third, random_delays
from tests.support.reference import Reference, Tensors, weights_of

ROWS = 6
SETTINGS: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2, "growth_factor": 4.0}
BAD_STEPS = (1, 4, 5)


def batches(count: int = 9, bad: Iterable[int] = BAD_STEPS) -> list[Batch]:
    """In the bad ones the target of one row, and so of one microbatch, is infinite."""
    made = [mlp_batch(ROWS, seed) for seed in range(count)]
    for index in bad:
        made[index].label[-1, 0] = math.inf
    return made


def scaled(batch: Batch, scale: Callable[[Tensor], Tensor]) -> Batch:
    return batch._replace(loss_fn=lambda output, target: scale(batch.loss_fn(output, target)))


class Seen(NamedTuple):
    scale: float
    loss: Tensor
    weights: Tensors


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def plain_trace(make: Callable[[Any], torch.optim.Optimizer], max_norm: float | None) -> list[Seen]:
    model = make_mlp()
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", **SETTINGS)
    seen = []
    for batch in batches():
        loss = torch.zeros(())
        for args, _, label in batch.split(2):
            part = scaler.scale(batch.loss_fn(model(*args), label))
            part.backward()
            loss += part.detach()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(Seen(scaler.get_scale(), loss, weights_of(model)))
    return seen


def engine_trace(
    engine: RoundPipe,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], object] | None,
    *,
    is_async: bool = False,
) -> list[Seen]:
    scaler = GradScaler(**SETTINGS)

    def step_fn() -> None:
        if clip is not None:
            scaler.unscale_(optimizer)
            clip()
        scaler.step(optimizer)
        optimizer.zero_grad()

    seen = []
    for batch in batches():
        loss = run_batch(engine, scaled(batch, scaler.scale), 2)
        engine.step(step_fn, is_async=is_async)
        scaler.update()
        # Reading weights would be a synchronisation point, which changes what asynchronous steps
        # compute.
        seen.append(Seen(scaler.get_scale(), loss, {} if is_async else engine_weights(engine)))
    return seen


def clippers(
    engine: RoundPipe, optimizer: torch.optim.Optimizer
) -> dict[str, Callable[[], object] | None]:
    return {
        "no clipping": None,
        "ours": lambda: roundpipe.clip_grad_norm_(optimizer, 0.05),
        "torch's": lambda: torch.nn.utils.clip_grad_norm_(engine.optim_parameters(), 0.05),
    }


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("clip", ["no clipping", "ours", "torch's"])
@pytest.mark.parametrize(
    "make", [sgd, adamw, roundpipe.optim.AdamW], ids=["sgd", "torch adamw", "our adamw"]
)
def test_synchronous_steps_leave_torchs_trace(
    make: Any, clip: str, devices: DeviceSet, engines: Engines
) -> None:
    """Scales to the bit; losses and weights too, or to rounding where clipping multiplies once
    instead of twice."""
    expected = plain_trace(
        lambda params: make(params) if make is not roundpipe.optim.AdamW else adamw(params),
        None if clip == "no clipping" else 0.05,
    )
    engine = engines(make_mlp(), devices)
    settings = {"lr": 0.01} if make is roundpipe.optim.AdamW else {}
    optimizer = make(engine.optim_parameters(), **settings)
    seen = engine_trace(engine, optimizer, clippers(engine, optimizer)[clip])
    assert [step.scale for step in seen] == [step.scale for step in expected]
    assert len({step.scale for step in expected}) > 2, "the scale has to move both ways"
    for actual, right in zip(seen, expected, strict=True):
        if torch.isfinite(right.loss):
            devices.check(
                actual.loss,
                right.loss,
                bitwise=clip == "no clipping" and make is not roundpipe.optim.AdamW,
            )
        devices.check(actual.weights, right.weights, bitwise=False)


class DelayedScaler:
    """The documented rule, plainly: what step t found is taken up by the update after the next."""

    def __init__(self) -> None:
        self.value, self._good = SETTINGS["init_scale"], 0
        self.found: list[bool] = []

    def update(self) -> None:
        if len(self.found) < 2:
            return
        if self.found[-2]:
            self.value, self._good = self.value * 0.5, 0
        else:
            self._good += 1
            if self._good == SETTINGS["growth_interval"]:
                self.value, self._good = self.value * SETTINGS["growth_factor"], 0


class UnscalingSGD(torch.optim.SGD):
    """Divides by the scale of its own losses, and skips."""

    def __init__(self, params: Iterable[Tensor], scaler: DelayedScaler) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self._scaler = scaler

    def step(self, closure: None = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self._scaler.found.append(
            not all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        )
        for gradient in gradients:
            gradient.mul_(1 / self._scaler.value)
        if not self._scaler.found[-1]:
            super().step()


PAUSES: dict[str, Callable[[], Callable[[], None]]] = {
    "as it is": lambda: lambda: None,
    "every third slow": every_third,
    "slow at random": lambda: random_delays(4),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_asynchronous_findings_take_effect_at_the_next_update(
    pause: str, devices: DeviceSet, engines: Engines
) -> None:
    """Whatever the timing, and every step is unscaled by the scale of its own losses."""
    model, scaler = make_mlp(), DelayedScaler()
    reference = Reference(model, lambda params: UnscalingSGD(params, scaler), staleness=1)
    expected = []
    for batch in batches():
        value = scaler.value
        loss = reference.forward_backward(
            batch.split(2),
            lambda output, target, batch=batch, value=value: batch.loss_fn(output, target) * value,
        )
        reference.step()
        scaler.update()
        expected.append((scaler.value, loss))
    assert len({value for value, _ in expected}) > 2, "the scale has to move both ways"

    engine = engines(model, devices)
    optimizer = PausingSGD(engine.optim_parameters(), pause=PAUSES[pause](), lr=0.05, momentum=0.9)
    seen = engine_trace(engine, optimizer, None, is_async=True)
    assert [step.scale for step in seen] == [value for value, _ in expected]
    for actual, (_, loss) in zip(seen, expected, strict=True):
        if torch.isfinite(loss):
            devices.check(actual.loss, loss)
    devices.check(engine_weights(engine), reference.weights)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(
    is_async: bool, engines: Engines
) -> None:
    """Also when what the last step found is still to be taken up; and from torch's own state."""
    whole, resumed = GradScaler(**SETTINGS), GradScaler(**SETTINGS)
    traces: list[list[float]] = [[], []]
    for scaler, trace in ((whole, traces[0]), (resumed, traces[1])):
        engine = engines(make_mlp(), ONE)
        optimizer = sgd(engine.optim_parameters())
        current = scaler
        for index, batch in enumerate(batches()):
            run_batch(engine, scaled(batch, current.scale), 2)
            engine.step(
                lambda current=current, optimizer=optimizer: current.step(optimizer),
                is_async=is_async,
            )
            current.update()
            trace.append(current.get_scale())
            if scaler is resumed and index in (2, 4):
                state, current = current.state_dict(), GradScaler()
                current.load_state_dict(state)
    assert traces[0] == traces[1]
    theirs = torch.amp.GradScaler("cpu", **SETTINGS)
    resumed.load_state_dict(theirs.state_dict())
    assert {name: resumed.state_dict()[name] for name in theirs.state_dict()} == theirs.state_dict()
    theirs.load_state_dict(whole.state_dict())
    assert theirs.get_scale() == whole.get_scale()


def test_settings_are_torchs() -> None:
    ours, theirs = GradScaler(init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    for name, value in (("growth_factor", 3.0), ("backoff_factor", 0.25), ("growth_interval", 7)):
        assert getattr(ours, f"get_{name}")() == getattr(theirs, f"get_{name}")()
        getattr(ours, f"set_{name}")(value)
        assert getattr(ours, f"get_{name}")() == value
    assert ours.is_enabled()
    nested = [torch.ones(2), (torch.ones(1), [torch.full((), 2.0)])]
    flat = [
        tensor.tolist()
        for tensor in itertools.chain([ours.scale(nested)[0]], [ours.scale(nested)[1][0]])
    ]
    assert flat == [
        tensor.tolist() for tensor in (theirs.scale(nested)[0], theirs.scale(nested)[1][0])
    ]
    with pytest.raises(ConfigError, match="growth_factor is 1.0"):
        GradScaler(growth_factor=1.0)
    with pytest.raises(ConfigError, match="backoff_factor is 1.5"):
        GradScaler(backoff_factor=1.5)


def test_a_disabled_scaler_only_steps(engines: Engines) -> None:
    reference = Reference(make_mlp(), sgd)
    engine = engines(make_mlp(), ONE)
    optimizer, scaler = sgd(engine.optim_parameters()), GradScaler(enabled=False)
    for batch in batches(3, bad=()):
        reference.forward_backward(batch.split(2), batch.loss_fn)
        reference.step()
        run_batch(engine, scaled(batch, scaler.scale), 2)
        engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
        scaler.update()
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    ONE.check(engine_weights(engine), reference.weights)


def test_two_optimizers_skip_each_for_itself(engines: Engines) -> None:
    """As torch's: the one without infs steps, and the scale backs off once."""

    class OnlyFirst(nn.Module):
        """Its own weight gets an infinite gradient, nobody else's does."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return x + Spoiled.apply(self.weight)

    class Spoiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight * 0

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.full_like(gradient, math.inf)

    def make() -> nn.Sequential:
        return nn.Sequential(OnlyFirst(), *make_mlp())

    batch = mlp_batch(ROWS)
    plain, theirs = make(), torch.amp.GradScaler("cpu", **SETTINGS)
    parameters = list(plain.parameters())
    pair = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:1], parameters[1:])]
    theirs.scale(batch.loss_fn(plain(*batch.args), batch.label)).backward()
    for optimizer in pair:
        theirs.step(optimizer)
    theirs.update()

    engine = engines(make(), TWO)
    masters = engine.optim_parameters()
    ours, scaler = (
        [torch.optim.SGD(part, lr=0.1) for part in (masters[:1], masters[1:])],
        GradScaler(**SETTINGS),
    )
    run_batch(engine, scaled(batch, scaler.scale), 1)
    engine.step(lambda: [scaler.step(optimizer) for optimizer in ours], is_async=False)
    scaler.update()
    assert scaler.get_scale() == theirs.get_scale() == SETTINGS["init_scale"] / 2
    TWO.check(engine_weights(engine), weights_of(plain))


def test_a_new_scale_is_taken_in_place_of_what_was_found(engines: Engines) -> None:
    engine = engines(make_mlp(), ONE)
    optimizer, scaler = sgd(engine.optim_parameters()), GradScaler(**SETTINGS)
    for batch, is_async in zip(batches(3, bad=(0, 1)), (False, True, True), strict=True):
        run_batch(engine, scaled(batch, scaler.scale), 2)
        engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=is_async)
        scaler.update(torch.tensor(64.0) if is_async else 32.0)
        assert scaler.get_scale() == (64.0 if is_async else 32.0)


def two_weights(scaler: Any, factor: float, dtype: torch.dtype) -> tuple[nn.Sequential, Batch]:
    """The weights' gradients are ``factor`` times the scale from each of two microbatches."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False, dtype=dtype))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(output.float().sum() * factor)

    return model, Batch((torch.ones(2, 2, dtype=dtype),), {}, torch.zeros(2, 1), loss_fn)


@pytest.mark.parametrize(
    ("dtype", "factor", "is_skipped"),
    [
        (torch.float16, 40000.0, True),  # each microbatch's is finite, their sum is not in fp16
        (torch.float32, 1e25, False),  # its square is not finite in fp32
        (torch.float32, 3e38, True),  # the sum is not finite in fp32 either
    ],
    ids=["sum beyond fp16", "square beyond fp32", "sum beyond fp32"],
)
def test_large_gradients_are_told_from_overflows(
    dtype: torch.dtype, factor: float, is_skipped: bool, engines: Engines
) -> None:
    scaler, theirs = GradScaler(init_scale=1.0), torch.amp.GradScaler("cpu", init_scale=1.0)
    gradient = torch.full((1, 2), factor, dtype=dtype)
    master = torch.nn.Parameter(torch.zeros(1, 2))
    master.grad = (gradient + gradient).float()
    optimizer = torch.optim.SGD([master], lr=1e-30)
    theirs.scale(torch.zeros(()))
    theirs.step(optimizer)
    theirs.update()
    assert (theirs.get_scale() == 0.5) == is_skipped

    model, batch = two_weights(scaler, factor, dtype)
    before = model[0].weight.detach().clone()
    engine = engines(model, ONE, optim_dtype=torch.float32)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-22 if factor == 1e25 else 1.0)
    run_batch(engine, batch, 2)
    engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
    scaler.update()
    assert scaler.get_scale() == theirs.get_scale()
    assert torch.equal(engine_weights(engine)["0.weight"], before) == is_skipped


def test_sums_over_calls_and_over_the_uses_of_a_tied_weight_are_looked_at(engines: Engines) -> None:
    """These are sums made on the host, which no device has looked at; torch's trace over two calls
    per step."""

    def make() -> nn.Sequential:
        model = make_mlp(2)
        return nn.Sequential(*model, nn.Tanh(), model[0])

    plain, theirs = make(), torch.amp.GradScaler("cpu", **SETTINGS)
    expected = sgd(plain.parameters())
    engine, scaler = engines(make(), TWO), GradScaler(**SETTINGS)
    optimizer = sgd(engine.optim_parameters())
    scales = []
    all_batches = batches(12, bad=(3, 8))
    for first in range(0, 12, 2):
        for batch in all_batches[first : first + 2]:
            theirs.scale(batch.loss_fn(plain(*batch.args), batch.label)).backward()
            run_batch(engine, scaled(batch, scaler.scale), 1)
        theirs.step(expected)
        theirs.update()
        expected.zero_grad()
        engine.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
        scaler.update()
        assert scaler.get_scale() == theirs.get_scale()
        TWO.check(engine_weights(engine), weights_of(plain), bitwise=False)
        scales.append(scaler.get_scale())
    assert len(set(scales)) > 2
