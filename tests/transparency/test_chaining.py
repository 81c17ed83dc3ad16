"""Two engines in a row, the microbatches of the first handed to the second unmerged.

The oracle is one plain model that is both, run microbatch by microbatch.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from roundpipe import (
    ConfigError,
    ModelExecutePlan,
    RoundPipe,
    RoundPipePackedData,
    RoundPipeRunConfig,
)
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, make_mlp, mlp_batch, squared_error_over
from tests.support.reference import Tensors, plain_call, weights_of

BATCH = mlp_batch(rows=6)
HALVES = [slice(0, 3), slice(3, 7)]


def make_halves() -> tuple[nn.Sequential, list[nn.Sequential]]:
    """A plain model of seven layers, and copies of its two halves."""
    model = make_mlp()
    return model, [nn.Sequential(*copy.deepcopy(model)[part]) for part in HALVES]


def of_both(halves: list[nn.Sequential], engines: list[RoundPipe]) -> Tensors:
    """The gradients of two engines by the names of the whole model."""
    gradients: Tensors = {}
    for engine, part in zip(engines, HALVES, strict=True):
        for name, gradient in engine_gradients(engine).items():
            index, rest = name.split(".", 1)
            gradients[f"{int(index) + part.start}.{rest}"] = gradient
    return gradients


def unmerged(num_microbatch: int, **settings: object) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=num_microbatch, merge_output=False, **settings)


@pytest.mark.parametrize("num_microbatch", [1, 3])
def test_the_values_are_those_of_the_microbatches(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    engine = engines(copy.deepcopy(model), devices)
    pieces = BATCH.args[0].chunk(num_microbatch)
    with torch.no_grad():
        packed = engine(*BATCH.args, roundpipe_run_config=unmerged(num_microbatch))
    assert isinstance(packed, RoundPipePackedData)
    assert packed.synchronize() is packed
    assert packed.rows == (6 // num_microbatch,) * num_microbatch
    for value, piece in zip(packed, pieces, strict=True):
        devices.check(value, model(piece))
    assert {value.device.type for value in packed} == {engine.devices[0].torch_device.type}


def test_outputs_of_forward_backward_can_be_unmerged(devices: DeviceSet, engines: Engines) -> None:
    model = make_mlp()
    plain = [model(piece) for piece in BATCH.args[0].chunk(2)]
    engine = engines(copy.deepcopy(model), devices)
    _, packed = engine.forward_backward(
        BATCH.args,
        label=BATCH.label,
        loss_fn=BATCH.loss_fn,
        return_outputs=True,
        run_config=unmerged(2),
    )
    assert isinstance(packed, RoundPipePackedData)
    for value, expected in zip(packed, plain, strict=True):
        devices.check(value, expected)


@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("how", ["forward_backward", "backward"])
def test_gradients_flow_through_both(
    how: str, num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    """Into the user's own layer before the first engine as well."""
    model, halves = make_halves()
    torch.manual_seed(3)
    before = nn.Linear(MLP_WIDTH, MLP_WIDTH)
    plain_before = copy.deepcopy(before)
    plain = plain_call(
        nn.Sequential(plain_before, *model), BATCH.split(num_microbatch), BATCH.loss_fn
    )
    first, second = (engines(half, devices) for half in halves)
    hidden = first(before(BATCH.args[0]), roundpipe_run_config=unmerged(num_microbatch))
    if how == "forward_backward":
        loss = second.forward_backward((hidden,), label=BATCH.label, loss_fn=BATCH.loss_fn)
    else:
        output = second(hidden)
        loss = sum_of_losses(output, num_microbatch)
        loss.backward()
    devices.check(loss.detach(), plain.loss)
    expected = {
        f"{int(name.split('.')[0]) - 1}.{name.split('.')[1]}": g
        for name, g in plain.gradients.items()
    }
    own = {f"-1.{name}": parameter.grad for name, parameter in before.named_parameters()}
    assert all(gradient is not None for gradient in own.values())
    devices.check(of_both(halves, [first, second]) | own, expected, bitwise=False)
    for engine in (first, second):
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        engine.step(optimizer.step, is_async=False)
        assert engine_gradients(engine) == {}


def sum_of_losses(output: Tensor, num_microbatch: int) -> Tensor:
    pieces = zip(output.chunk(num_microbatch), BATCH.label.chunk(num_microbatch), strict=True)
    losses = [BATCH.loss_fn(piece, label) for piece, label in pieces]
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def test_the_second_engine_takes_the_microbatches_as_they_are(
    devices: DeviceSet, engines: Engines
) -> None:
    """Whatever its own setting; beside other tensors, which are cut like them; in a container; as a
    label."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

        def forward(self, inputs: dict[str, Tensor], *, per_row: Tensor, vector: Tensor) -> Tensor:
            assert len(inputs["hidden"]) == len(per_row), "rows were separated"
            return self.linear(inputs["hidden"]) * per_row * vector.sum()

    first = engines(make_mlp(), devices)
    torch.manual_seed(4)
    second = engines(Joins(), devices, model_run_config=RoundPipeRunConfig(num_microbatch=5))
    rows = torch.randn(7, MLP_WIDTH)
    per_row, vector = torch.rand(7, 1), torch.rand(3)
    with torch.no_grad():
        hidden = first(rows, roundpipe_run_config=unmerged(3))
        assert [len(value) for value in hidden] == [3, 2, 2]
        expected = second.model({"hidden": make_mlp()(rows)}, per_row=per_row, vector=vector)
    loss = second.forward_backward(
        ({"hidden": hidden},),
        {"per_row": per_row, "vector": vector},
        label=hidden,
        loss_fn=lambda output, target: (output - target).square().sum(),
    )
    devices.check(loss, (expected - make_mlp()(rows)).square().sum().detach(), bitwise=False)


def test_a_single_microbatch_is_unpacked_too(engines: Engines) -> None:
    _, halves = make_halves()
    first, second = (engines(half, ONE) for half in halves)
    with torch.no_grad():
        output = second(first(*BATCH.args, roundpipe_run_config=unmerged(1)))
    ONE.check(output, make_mlp()(BATCH.args[0]))


def test_one_engine_after_itself(devices: DeviceSet, engines: Engines) -> None:
    """A weight used twice: its gradient is the sum of both uses."""
    model = make_mlp()
    plain = copy.deepcopy(model)
    loss_fn = squared_error_over(6)
    expected = plain_call(nn.Sequential(plain, plain), BATCH.split(2), loss_fn)
    engine = engines(model, devices)
    hidden = engine(*BATCH.args, roundpipe_run_config=unmerged(2))
    loss = engine.forward_backward((hidden,), label=BATCH.label, loss_fn=loss_fn)
    devices.check(loss, expected.loss)
    gradients = {name.removeprefix("0."): value for name, value in expected.gradients.items()}
    devices.check(engine_gradients(engine), gradients, bitwise=False)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_is_used_before_it_is_there(count: int, engines: Engines) -> None:
    """On devices that copy late, shared by both engines."""
    adversaries = Adversaries(count)
    model, halves = make_halves()
    plain = plain_call(model, BATCH.split(3), BATCH.loss_fn)
    first, second = (engines(half, adversaries) for half in halves)  # type: ignore[arg-type]
    plan = ModelExecutePlan([range(1), range(1, 2)], [range(2, 3), range(2)])
    hidden = first(*BATCH.args, roundpipe_run_config=unmerged(3, execute_plan=plan))
    loss = second.forward_backward((hidden,), label=BATCH.label, loss_fn=BATCH.loss_fn)
    ONE.check(loss, plain.loss)
    ONE.check(of_both(halves, [first, second]), plain.gradients)
    assert adversaries.faults == []


def test_wrong_numbers_of_microbatches_are_refused(engines: Engines) -> None:
    """Naming both, and without effect."""
    first, second = (engines(make_mlp(seed=seed), TWO) for seed in (0, 1))
    run_batch(second, BATCH, 2)
    gradients, weights = engine_gradients(second), weights_of(second.model)
    with torch.no_grad():
        two, three = (first(*BATCH.args, roundpipe_run_config=unmerged(count)) for count in (2, 3))
    with pytest.raises(
        ConfigError, match=r"args\[0\] has 2 microbatches of \[3, 3\].*kwargs\['other'\] has 3 of"
    ):
        second.forward_backward((two,), {"other": three}, loss_fn=BATCH.loss_fn)
    with pytest.raises(ConfigError, match="label has 3 of"):
        second.forward_backward((two,), label=three, loss_fn=BATCH.loss_fn)
    with pytest.raises(ConfigError, match="split_input"):
        second(
            two,
            roundpipe_run_config=RoundPipeRunConfig(
                split_input=lambda args, kwargs, n: ([args], [kwargs])
            ),
        )
    with pytest.raises(ConfigError, match="cut already"):
        second.forward_backward(microbatches=[((two,), {}, BATCH.label)], loss_fn=BATCH.loss_fn)
    TWO.check(engine_gradients(second), gradients)
    TWO.check(weights_of(second.model), weights)


def test_a_failure_in_the_second_leaves_both_as_they_were(engines: Engines) -> None:
    first, second = (engines(make_mlp(seed=seed), TWO) for seed in (0, 1))
    hidden = first(*BATCH.args, roundpipe_run_config=unmerged(2))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("the user's")

    with pytest.raises(ArithmeticError, match="the user's"):
        second.forward_backward((hidden,), label=BATCH.label, loss_fn=loss_fn)
    assert engine_gradients(first) == engine_gradients(second) == {}
    second.forward_backward((hidden,), label=BATCH.label, loss_fn=BATCH.loss_fn)
    assert engine_gradients(first)


class Failing(nn.Module):
    """The identity, whose backward raises while ``fails`` is not empty. All copies of the module
    share that list."""

    def __init__(self, fails: list[str]) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, hidden: Tensor) -> Tensor:
        passed = hidden * 1.0
        if passed.requires_grad:
            passed.register_hook(self.look)
        return passed

    def look(self, gradient: Tensor) -> None:
        if self.fails:
            raise ArithmeticError(self.fails[0])


@pytest.mark.parametrize("how", ["forward_backward", "backward"])
def test_a_failure_in_the_firsts_backward_leaves_all_as_they_were(
    how: str, devices: DeviceSet, engines: Engines
) -> None:
    """By then the engines behind it have been through theirs. What all had before stays, and the
    next time works."""
    fails: list[str] = []
    failing = nn.Sequential(make_mlp(2, seed=0), Failing(fails))
    chained = [
        engines(model, devices) for model in (failing, make_mlp(2, seed=1), make_mlp(2, seed=2))
    ]

    def run() -> None:
        hidden = BATCH.args[0]
        for engine in chained[:2]:
            hidden = engine(hidden, roundpipe_run_config=unmerged(2))
        if how == "forward_backward":
            chained[2].forward_backward((hidden,), label=BATCH.label, loss_fn=BATCH.loss_fn)
        else:
            BATCH.loss_fn(chained[2](hidden), BATCH.label).backward()

    run()
    before = [engine_gradients(engine) for engine in chained]
    fails.append("the user's")
    with pytest.raises(ArithmeticError, match="the user's"):
        run()
    for engine, gradients in zip(chained, before, strict=True):
        devices.check(engine_gradients(engine), gradients)
    fails.clear()
    run()
    for engine, gradients in zip(chained, before, strict=True):
        devices.check(
            engine_gradients(engine), {name: 2 * gradient for name, gradient in gradients.items()}
        )
