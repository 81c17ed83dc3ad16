"""What the caller's thread is set to, and what the caller does to what it got, changes nothing in
the engine."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.optim import SGD
from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights

ONE_EACH = ModelExecutePlan(fwd_plan=[range(1), range(1, 2)], bwd_plan=[range(1, 2), range(1)])


class UsedTwice(nn.Module):
    """Uses a weight twice. ``is_left``: some other thread leaves autocast in between, and so
    empties its cache."""

    is_left = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)
        if UsedTwice.is_left:
            torch.clear_autocast_cache()
        return self.linear(torch.tanh(hidden))


class WithInput(nn.Module):
    """Returns its input beside the output, as models do that collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(self.linear(hidden)), hidden


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train(engines: Engines, state: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Both ways of making gradients, evaluation, and steps of both kinds, on the caller's thread in
    that state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    inputs = torch.randn(8, 4)
    engine = engines(model, TWO)
    found = []
    with state():
        optimizer = SGD(engine.optim_parameters(), lr=0.1, momentum=0.9)
        for is_async in (False, True):
            loss = engine.forward_backward(
                (inputs,), loss_fn=lambda outputs, _: outputs.square().sum()
            )
            engine.step(optimizer.step, is_async=is_async)
            outputs = engine(inputs)
            outputs.sum().backward()
            engine.step(optimizer.step, is_async=is_async)
            with torch.no_grad():
                found += [loss, outputs.detach(), engine(inputs)]
        engine.synchronize()
    return [*found, *engine_weights(engine).values(), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(lambda: torch.device("meta"), id="another default device"),
        pytest.param(lambda: default_dtype(torch.bfloat16), id="another default dtype"),
    ],
)
def test_the_engine_makes_its_own_tensors_where_they_belong(
    engines: Engines, state: Callable[[], AbstractContextManager[object]]
) -> None:
    """Also the generator is advanced as ever: nothing is drawn from another device's."""
    for actual, expected in zip(train(engines, state), train(engines, nullcontext), strict=True):
        assert torch.equal(actual, expected)


def test_what_forward_returned_may_be_written_before_backward(
    engines: Engines, devices: DeviceSet
) -> None:
    """Plain PyTorch would refuse the backward, because it reads what was written; the engine has
    handed out a copy.

    Twice, because the first call of a layer makes copies anyway.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), WithInput())
    inputs = torch.randn(4, 3)
    engine = engines(
        model, devices, model_run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=ONE_EACH)
    )
    for config in (RoundPipeRunConfig(), RoundPipeRunConfig(merge_output=False)):
        gradients = []
        for writes in (False, True, True):
            engine.zero_grad()
            outputs = engine(inputs, roundpipe_run_config=config)
            pairs = [outputs] if config.merge_output is None else outputs
            if writes:
                with torch.no_grad():
                    for _, hidden in pairs:
                        hidden.zero_()
            torch.stack([output.sum().cpu() for output, _ in pairs]).sum().backward()
            gradients.append(engine_gradients(engine))
        for actual in gradients[1:]:
            devices.check(actual, gradients[0])


def test_under_autocast_other_threads_change_no_bit(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether autocast casts a weight once or twice decides in which dtype the gradients of its
    uses add up."""
    torch.manual_seed(0)
    model = nn.Sequential(UsedTwice(), UsedTwice(), nn.Linear(32, 1))
    inputs = torch.randn(16, 32)
    gradients = []
    for is_left in (False, True):
        monkeypatch.setattr(UsedTwice, "is_left", is_left)
        engine = engines(model, TWO)
        with torch.autocast("cpu", torch.bfloat16):
            engine.forward_backward(
                (inputs,), loss_fn=lambda outputs, _: outputs.float().square().sum()
            )
        gradients.append(engine_gradients(engine))
        engine.close()
    TWO.check(*gradients)
