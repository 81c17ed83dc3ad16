"""Calls that were made again after a device was out of memory, though what had failed had left
something behind.

Parameters of the caller's own in ``loss_fn`` got the gradients of microbatches that went well
before the one that did not, and got them again. Layers that write to their input wrote to the
caller's a second time. And where the caller's graph led back into the same engine, a failing
backward there made the whole call begin again, with that graph half gone. Other calls of the same
shapes were refused once enough had failed, even if they had always fitted. An error that names
another one, which names it, was followed for ever.
"""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.device import VirtualDevice
from roundpipe.errors import clear_frames

WIDTH = 4
AMPLE = 1 << 20


class OutOfMemory(nn.Module):
    """A device is full at these runs of the layer."""

    def __init__(self, *runs: int) -> None:
        super().__init__()
        self.runs = iter(range(1000))
        self.failing = runs

    def forward(self, x: Tensor) -> Tensor:
        if next(self.runs) in self.failing:
            raise torch.OutOfMemoryError("too much")
        return x


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def squared(output: Tensor, _: Any) -> Tensor:
    return output.square().sum()


def engine_of(*layers: nn.Module, **settings: Any) -> RoundPipe:
    config = RoundPipeRunConfig(
        num_microbatch=2, execute_plan=ModelExecutePlan([], [range(len(layers))])
    )
    return RoundPipe(
        nn.Sequential(*layers), devices=[VirtualDevice(0)], model_run_config=config, **settings
    )


def test_parameters_in_the_loss_get_their_gradients_once() -> None:
    first, own = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH))
    x = torch.randn(8, WIDTH)
    expected = torch.autograd.grad(squared(first(x[:4]) * own, None), own)
    with engine_of(first, OutOfMemory(1)) as engine:
        with pytest.raises(torch.OutOfMemoryError):
            engine.forward_backward((x,), loss_fn=lambda output, _: squared(output * own, None))
        assert own.grad is not None
        assert torch.equal(own.grad, *expected)


@pytest.mark.parametrize("loss_fn", [squared, lambda output, _: output.mul_(2).sum()])
def test_a_loss_of_outputs_alone_may_be_taken_again(
    loss_fn: Callable[[Tensor, Any], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    x, gradients = torch.randn(8, WIDTH), []
    for failing in ([], [1]):
        torch.manual_seed(0)
        first = nn.Linear(WIDTH, WIDTH)
        with engine_of(first, OutOfMemory(*failing)) as engine:
            engine.forward_backward((x,), loss_fn=loss_fn)
            engine.synchronize()
        gradients.append(first.weight.grad)
    assert "made again" in caplog.text
    assert torch.equal(*gradients)


def without_gradients(engine: RoundPipe, x: Tensor) -> None:
    with torch.no_grad():
        engine(x)


def loss_alone(engine: RoundPipe, x: Tensor) -> None:
    engine.forward_loss((x,), loss_fn=squared)


@pytest.mark.parametrize("call", [without_gradients, loss_alone])
@pytest.mark.parametrize("is_inference", [False, True])
def test_inputs_are_written_once(
    call: Callable[[RoundPipe, Tensor], None], is_inference: bool
) -> None:
    with torch.inference_mode(is_inference):
        x = torch.ones(8, WIDTH)
    layers = Doubling(), OutOfMemory(1), nn.Linear(WIDTH, WIDTH)
    with engine_of(*layers) as engine, pytest.raises(torch.OutOfMemoryError):
        call(engine, x)
    assert torch.equal(x, torch.full_like(x, 2))


def test_a_graph_of_the_callers_is_gone_through_once() -> None:
    """It leads back into the same engine, whose recompute fails there."""
    x = torch.randn(8, WIDTH, requires_grad=True)
    layers = (
        nn.Linear(WIDTH, WIDTH),
        OutOfMemory(4, 5),
    )  # two microbatches forward, two in the call, then
    with engine_of(*layers) as engine:
        hidden = engine(x) + x.exp()
        with pytest.raises(torch.OutOfMemoryError):
            engine.forward_backward((hidden,), loss_fn=squared)


def test_calls_that_fitted_are_not_refused_after_others_that_did_not() -> None:
    """Somebody leaves out batches that do not fit, and goes on."""
    x, fails = torch.randn(8, WIDTH), OutOfMemory(*range(2, 100))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), fails)
    with RoundPipe(model, devices=[VirtualDevice(0, AMPLE)]) as engine:
        engine.forward_backward((x,), loss_fn=squared)
        for _ in range(20):
            with pytest.raises(torch.OutOfMemoryError):
                engine.forward_backward((x,), loss_fn=squared)
        fails.failing = ()
        engine.forward_backward((x,), loss_fn=squared, return_outputs=True)
        engine.eval()
        engine.forward_loss((x,), loss_fn=squared)


@pytest.mark.parametrize("begin_at", [0, 1])
def test_errors_that_name_each_other_are_cleared_once(begin_at: int) -> None:
    held: list[weakref.ref[Tensor]] = []

    def failing() -> Exception:
        activation = torch.zeros(WIDTH)
        held.append(weakref.ref(activation))
        try:
            raise ValueError
        except ValueError as error:
            return error

    errors = [failing(), failing()]
    errors[0].__cause__, errors[1].__context__ = errors[1], errors[0]
    assert None not in [reference() for reference in held]
    clear_frames(errors[begin_at])
    assert [reference() for reference in held] == [None, None]


class Counting(nn.Module):
    """Counts runs where a recompute, which sees modules as they were, does not take them back."""

    runs: ClassVar[list[None]] = []

    def forward(self, x: Tensor) -> Tensor:
        Counting.runs.append(None)
        return x


@pytest.mark.parametrize("grain", [None, "stage"])
def test_the_last_try_recomputes_one_layer_at_a_time(grain: Any) -> None:
    """And so do calls after it, unless the caller has said otherwise."""
    plan = ModelExecutePlan([range(3)], [range(3, 4), range(3)])
    layers = Counting(), nn.Linear(WIDTH, WIDTH), OutOfMemory(0, 1, 2), nn.Linear(WIDTH, WIDTH)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan, recompute_grain=grain)
    x = torch.randn(8, WIDTH, requires_grad=True)
    with RoundPipe(
        nn.Sequential(*layers), devices=[VirtualDevice(0)], model_run_config=config
    ) as engine:
        for _ in range(2):
            Counting.runs.clear()
            engine.forward_backward((x,), loss_fn=squared)
            engine.synchronize()
        assert len(Counting.runs) == (
            3 if grain is None else 2
        )  # a forward, and once or twice again


def cuts_of(x: Tensor, asked: list[int]) -> Callable[[int], list[Any]]:
    def cut(count: int) -> list[Any]:
        asked.append(count)
        return [((part,), {}, None) for part in x.chunk(count)]

    return cut


@pytest.mark.parametrize("call", ["forward_backward", "forward_loss"])
def test_a_batch_that_the_engine_may_cut_is_cut_finer(call: str) -> None:
    """What it came to is kept for later calls. The model's size of microbatch does not matter."""
    x, asked = torch.randn(8, WIDTH), list[int]()
    first = nn.Linear(WIDTH, WIDTH)
    expected = squared(first(x), None)
    with engine_of(first, OutOfMemory(*range(4))) as engine:
        for _ in range(2):
            cut = cuts_of(x, asked)
            loss = getattr(engine, call)(microbatches=cut, loss_fn=squared)
            torch.testing.assert_close(loss, expected.detach())
    assert asked == [2, 4, 2, 4]


def test_a_batch_is_cut_no_finer_than_it_can_be() -> None:
    x, asked = torch.randn(3, WIDTH), list[int]()
    with (
        engine_of(nn.Linear(WIDTH, WIDTH), OutOfMemory(*range(1000))) as engine,
        pytest.raises(torch.OutOfMemoryError, match="too much"),
    ):
        engine.forward_backward(microbatches=cuts_of(x, asked), loss_fn=squared)
    assert asked == [2, 4, 6]
