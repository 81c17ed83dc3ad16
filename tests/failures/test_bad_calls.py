"""Slips in how an engine is called: what was meant is said, and nothing is made of what was not."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from tests.support.device_sets import TWO
from tests.support.engines import Engines

ROWS = torch.randn(1, 4, 4)  # the rows of its only row would make a batch too
UNMERGED = RoundPipeRunConfig(merge_output=False)


def total(outputs: Tensor, _: Any) -> Tensor:
    return outputs.sum()


@pytest.fixture
def engine(engines: Engines) -> RoundPipe:
    return engines(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), TWO)


CALLS: dict[str, tuple[Callable[[RoundPipe], object], str]] = {
    "a tensor": (
        lambda engine: engine.forward_backward(ROWS, loss_fn=total),
        "input_args: a Tensor.*tuple",
    ),
    "a dictionary": (
        lambda engine: engine.forward_backward({"input": ROWS}, loss_fn=total),  # type: ignore[arg-type]
        "input_args: a dict.*tuple",
    ),
    "packed outputs": (
        lambda engine: engine.forward_backward(
            engine(ROWS, roundpipe_run_config=UNMERGED), loss_fn=total
        ),
        "input_args: a RoundPipePackedData.*tuple",
    ),
    "a tensor by name": (
        lambda engine: engine.forward_backward((), ROWS, loss_fn=total),  # type: ignore[arg-type]
        "input_kwargs: a Tensor.*dictionary",
    ),
    "a tensor to evaluate": (
        lambda engine: engine.forward_loss(ROWS, loss_fn=total),
        "input_args: a Tensor.*tuple",
    ),
    "a microbatch's tensor": (
        lambda engine: engine.forward_backward(
            microbatches=[((ROWS,), {}, None), (ROWS, {}, None)], loss_fn=total
        ),
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


SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "devices": (
        lambda: RoundPipe(nn.Linear(2, 2), devices=1.5),
        "devices is 1.5; give a number of devices or a list",
    ),  # type: ignore[arg-type]
    "a set of devices": (
        lambda: RoundPipe(nn.Linear(2, 2), devices={"cpu"}),
        "give a number of devices or a list",
    ),  # type: ignore[arg-type]
    "memory": (
        lambda: RoundPipe(nn.Linear(2, 2), devices=1, max_gpu_memory="20 gigs"),
        "max_gpu_memory is '20 gigs'; give a size with a unit, such as '24GB'",
    ),
    "no memory": (
        lambda: RoundPipe(nn.Linear(2, 2), devices=1, max_gpu_memory=0),
        "max_gpu_memory is 0; .*positive",
    ),
    "a dtype's name": (
        lambda: RoundPipe(nn.Linear(2, 2), devices=1, optim_dtype="float32"),  # type: ignore[arg-type]
        "optim_dtype is 'float32'; give .* torch.float32",
    ),
    "integers": (
        lambda: RoundPipe(nn.Linear(2, 2), devices=1, grad_dtype=torch.int8),
        "grad_dtype is torch.int8; give a floating-point dtype",
    ),
    "an engine": (
        lambda: RoundPipe(RoundPipe(nn.Linear(2, 2), devices=1), devices=1),
        "wrapped already",
    ),
    "a class": (lambda: RoundPipe(nn.Linear, devices=1), "the class Linear; give an nn.Module"),  # type: ignore[arg-type]
    "layers": (lambda: wrap_model_to_roundpipe([nn.Linear(2, 2)]), "a list; give .*nn.Sequential"),  # type: ignore[arg-type]
    "half a microbatch": (
        lambda: RoundPipeRunConfig(num_microbatch=2.5),
        "num_microbatch is 2.5; .*integer",
    ),  # type: ignore[arg-type]
    "a plan": (
        lambda: RoundPipeRunConfig(execute_plan=[[0, 1]]),
        "execute_plan is a list; .*ModelExecutePlan",
    ),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_refused_where_they_are_made(name: str) -> None:
    make, message = SETTINGS[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_losses_are_as_many_in_each_microbatch(engine: RoundPipe) -> None:
    """The rows of the last microbatch are fewer; one loss for each row cannot be added up."""
    rows = torch.randn(3, 4)
    with pytest.raises(
        ConfigError, match="returned 2 losses for the first microbatches and 1 for microbatch 1"
    ):
        engine.forward_backward(
            (rows,),
            loss_fn=lambda outputs, _: list(outputs.sum(1)),
            run_config=RoundPipeRunConfig(num_microbatch=2),
        )


def test_a_forked_process_is_told_instead_of_waiting_forever(
    engine: RoundPipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads do not come along into a fork, so nobody there would do what is asked."""
    with monkeypatch.context() as there:
        there.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ConfigError, match="forked process"):
            engine(ROWS)
    engine.forward_backward((ROWS,), loss_fn=total)
