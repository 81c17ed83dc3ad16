"""The process's default dtype and the caller's default device are for the user's tensors, not for
the optimizer's."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_weights


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


OPTIMIZERS = ("SGD", "Adam", "AdamW", "Lion", "LeanAdamW")


def train(engines: Engines, name: str, state: AbstractContextManager[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model, inputs = (
        nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)),
        torch.randn(8, 40),
    )
    engine = engines(model, ONE, optim_dtype=torch.float32)
    norms = []
    with state:
        optimizer = getattr(roundpipe.optim, name)(engine.optim_parameters(), lr=1e-2)
        scaler = roundpipe.GradScaler(init_scale=8.0)

        def update() -> None:
            scaler.unscale_(optimizer)
            norms.append(roundpipe.clip_grad_norm_(engine, 0.1))
            scaler.step(optimizer)
            optimizer.zero_grad()

        for _ in range(2):
            engine.forward_backward(
                (inputs,), loss_fn=lambda outputs, _: scaler.scale(outputs.square().sum())
            )
            engine.step(update, is_async=False)
            scaler.update()
    return [*norms, *engine_weights(engine).values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "state", [default_dtype, lambda: torch.device("meta")], ids=["dtype", "device"]
)
def test_a_default_changes_no_bit(
    name: str, state: Callable[[], AbstractContextManager[Any]], engines: Engines
) -> None:
    expected = train(engines, name, nullcontext())
    for actual, wanted in zip(train(engines, name, state()), expected, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted)
