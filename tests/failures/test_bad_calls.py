"""Slips in how an engine is called: what was meant is said, and nothing is made of what was not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from device_sets import TWO
from engines import Engines
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError

ROWS = torch.randn(1, 4, 4)  # the rows of its only row would make a batch too
UNMERGED = RoundPipeRunConfig(merge_output=False)


def total(outputs: Tensor, _: Any) -> Tensor:
    return outputs.sum()


@pytest.fixture
def engine(engines: Engines) -> RoundPipe:
    return engines(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), TWO)


CALLS: dict[str, tuple[Callable[[RoundPipe], object], str]] = {
    "a tensor": (lambda engine: engine.forward_backward(ROWS, loss_fn=total), "input_args: a Tensor.*tuple"),
    "a dictionary": (
        lambda engine: engine.forward_backward({"input": ROWS}, loss_fn=total),  # type: ignore[arg-type]
        "input_args: a dict.*tuple",
    ),
    "packed outputs": (
        lambda engine: engine.forward_backward(engine(ROWS, roundpipe_run_config=UNMERGED), loss_fn=total),
        "input_args: a RoundPipePackedData.*tuple",
    ),
    "a tensor by name": (
        lambda engine: engine.forward_backward((), ROWS, loss_fn=total),  # type: ignore[arg-type]
        "input_kwargs: a Tensor.*dictionary",
    ),
    "a tensor to evaluate": (lambda engine: engine.forward_loss(ROWS, loss_fn=total), "input_args: a Tensor.*tuple"),
    "a microbatch's tensor": (
        lambda engine: engine.forward_backward(microbatches=[((ROWS,), {}, None), (ROWS, {}, None)], loss_fn=total),
        r"microbatches\[1\]'s args: a Tensor.*tuple",
    ),
    "a microbatch without a label": (
        lambda engine: engine.forward_backward(microbatches=[((ROWS,), {})], loss_fn=total),  # type: ignore[list-item]
        r"microbatches\[0\] is not \(args, kwargs, label\)",
    ),
    "an optimizer": (
        lambda engine: engine.step(torch.optim.SGD(engine.optim_parameters())),  # type: ignore[arg-type]
        "step.. needs a function.*optimizer.step.*SGD",
    ),
    "what an optimizer's step returned": (
        lambda engine: engine.step(None),  # type: ignore[arg-type]
        "step.. needs a function.*NoneType",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_told_what_was_meant(name: str, engine: RoundPipe) -> None:
    call, message = CALLS[name]
    with pytest.raises(ConfigError, match=message):
        call(engine)
    before = [parameter.clone() for parameter in engine.parameters()]
    engine.forward_backward((ROWS,), loss_fn=total)
    engine.step(lambda: None, is_async=False)
    assert all(map(torch.equal, engine.parameters(), before))


def test_a_microbatch_may_do_without_keyword_arguments(engine: RoundPipe) -> None:
    """As ``input_kwargs`` may be None."""
    losses = [
        engine.forward_backward(microbatches=[((ROWS,), kwargs, None)], loss_fn=total)  # type: ignore[list-item]
        for kwargs in ({}, None)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("devices", [1.5, {"cuda:0"}, "cuda:0"], ids=str)
def test_devices_are_a_number_or_a_list(devices: Any) -> None:
    with pytest.raises(ConfigError, match="give an int .virtual devices. or a list"):
        RoundPipe(nn.Linear(2, 2), devices=devices)
