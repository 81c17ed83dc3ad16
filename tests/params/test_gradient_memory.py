"""Host memory for gradients: one set for synchronous steps, two for asynchronous ones, and nothing
wider beside it."""

from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.params import gradients, window
from roundpipe.step import write_back
from tests.support.device_sets import TWO
from tests.support.engines import Engines, run_batch, train_steps
from tests.support.models import make_mlp, mlp_batch

NUM_LINEARS = 4
BATCHES = [
    batch._replace(args=(batch.args[0].bfloat16(),), label=batch.label.bfloat16())
    for batch in (mlp_batch(rows=4, seed=seed) for seed in range(8))
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
    """The dtypes in each block of memory that was made for a layer's gradients."""
    blocks: list[set[torch.dtype]] = []

    class Counted(gradients.GradientBuffer):
        def __init__(self, layout: gradients.Layout, *others: Any) -> None:
            super().__init__(layout, *others)
            blocks.append({dtype for _, _, dtype in layout})

    monkeypatch.setattr(gradients, "GradientBuffer", Counted)
    return blocks


@pytest.mark.parametrize(("is_async", "sets"), [(False, 1), (True, 2)], ids=["sync", "async"])
def test_memory_is_reused_from_step_to_step(
    is_async: bool, sets: int, made: list[set[torch.dtype]], engines: Engines
) -> None:
    engine = engines(make_mlp(NUM_LINEARS).bfloat16(), TWO, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)
    train_steps(engine, optimizer, BATCHES, 2, is_async=is_async)
    engine.synchronize()
    assert len(made) <= sets * NUM_LINEARS
    assert set().union(*made) == {torch.bfloat16}


def test_only_sums_over_calls_are_wider(made: list[set[torch.dtype]], engines: Engines) -> None:
    """So the test above would have noticed."""
    engine = engines(make_mlp(NUM_LINEARS).bfloat16(), TWO, optim_dtype=torch.float32)
    for batch in BATCHES[:2]:
        run_batch(engine, batch, 2)
    engine.synchronize()
    assert made.count({torch.float32}) == NUM_LINEARS


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_memory_of_the_layers_that_are_wanted_next_comes_back_first(
    is_async: bool, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    """Beside an asynchronous update the next call's gradients come, deep layers first; behind a
    synchronous one its forward, which needs shallow layers first."""
    given_back = list[int]()
    release = window.GradientWindow._release

    def noted(self: Any, layer: int) -> None:
        if layer in self._layers:
            given_back.append(layer)
        release(self, layer)

    monkeypatch.setattr(window.GradientWindow, "_release", noted)
    monkeypatch.setattr(write_back, "_TOGETHER_BYTES", 1)
    engine = engines(make_mlp(NUM_LINEARS).bfloat16(), TWO, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)
    train_steps(engine, optimizer, BATCHES[:1], 2, is_async=is_async)
    engine.synchronize()
    trained = [index for index, layer in enumerate(engine._store.layers) if layer.trainable]
    assert given_back == (trained[::-1] if is_async else trained)
