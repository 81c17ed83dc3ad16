"""Host memory for gradients: one set for synchronous steps, two for asynchronous ones, and nothing
wider beside it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.memory.pinning import HostMemory
from roundpipe.params import gradient_buffers, window
from roundpipe.params.dtypes import GradientRules
from roundpipe.params.working import LayerParameters, ParameterStore
from roundpipe.step import write_back
from tests.support.device_sets import ONE, TWO
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

    class Counted(gradient_buffers.GradientBuffer):
        def __init__(self, layout: gradient_buffers.Layout, *others: Any) -> None:
            super().__init__(layout, *others)
            blocks.append({dtype for _, _, dtype in layout})

    monkeypatch.setattr(gradient_buffers, "GradientBuffer", Counted)
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


class Expecting:
    """Buffers whose thread is the test: it does the ``jobs`` when it likes."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        memory = HostMemory("off", accelerated=False)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
        self.layers: Sequence[LayerParameters] = ParameterStore(model, memory).layers
        rules = GradientRules(torch.float32, None)
        self.buffers = gradient_buffers.GradientBuffers(memory, rules, self.jobs.append)

    def take(self, layer: int) -> gradient_buffers.GradientBuffer:
        return self.buffers.take(self.layers[layer], self.layers[layer].trainable)


def test_what_is_expected_is_made_before_it_is_taken(made: list[set[torch.dtype]]) -> None:
    thread = Expecting()
    thread.buffers.expect(reversed(thread.layers))
    thread.jobs.pop(0)()  # the deepest layer's
    assert len(made) == 1
    taken = thread.take(1)
    assert len(made) == 1
    # The other one's turn has not come: nobody waits for it, and it is not made twice.
    thread.take(0)
    assert len(made) == 2
    thread.jobs.pop(0)()
    assert len(made) == 2
    # From here on they go round.
    thread.buffers.give_back(taken)
    thread.buffers.expect(reversed(thread.layers))
    assert not thread.jobs
    assert thread.take(1) is taken


def test_what_is_frozen_is_not_expected(made: list[set[torch.dtype]]) -> None:
    thread = Expecting()
    for use in thread.layers[0].uses:
        use.parameter.requires_grad_(False)
    thread.buffers.expect(thread.layers)
    assert len(thread.jobs) == 1
    thread.jobs.pop()()
    # An adapter that was set meanwhile has another layout, so what was made is of no use.
    for use in thread.layers[1].uses[:1]:
        use.parameter.requires_grad_(False)
    assert set(thread.take(1).tensors) == {use.place for use in thread.layers[1].uses[1:]}
    assert len(made) == 2


def test_memory_that_cannot_be_made_is_told_to_who_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("as asked for")

    thread = Expecting()
    thread.buffers.expect(thread.layers)
    with monkeypatch.context() as patched:
        patched.setattr(gradient_buffers, "GradientBuffer", refuse)
        thread.buffers.clear()
        thread.buffers.expect(thread.layers)
    thread.jobs[-2]()
    with pytest.raises(MemoryError, match="as asked for"):
        thread.take(0)
    assert thread.take(0).tensors  # the next call finds it made again
    for job in thread.jobs[:2]:
        job()  # those of before were let go of: they make nothing
    thread.buffers.clear()


def test_an_engine_expects_what_its_first_backward_needs(
    monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    expected = list[int]()
    expect = gradient_buffers.GradientBuffers.expect

    def noted(self: Any, layers: Iterable[LayerParameters]) -> None:
        found = list(layers)
        expected.extend(layer.layer for layer in found)
        expect(self, found)

    monkeypatch.setattr(gradient_buffers.GradientBuffers, "expect", noted)
    engine = engines(make_mlp(NUM_LINEARS).bfloat16(), ONE, optim_dtype=torch.float32)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)
    train_steps(engine, optimizer, BATCHES[:1], 2, is_async=False)
    assert sorted(set(expected)) == list(range(len(engine.model)))
    assert expected[0] == len(engine.model) - 1
