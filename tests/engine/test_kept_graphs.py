"""A forward in the caller's graph may keep its layers' graphs until the backward: the same numbers
as without, from one run of each layer."""

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.memory.slot_sizes import slot_bytes
from roundpipe.testing import AdversarialDevice

NUM_LAYERS, WIDTH, ROWS = 6, 16, 12
KEEP = RoundPipeRunConfig(keep_graphs=True, num_microbatch=4)


class Block(nn.Module):
    """Counts its forwards, on all devices and by all replicas."""

    runs: ClassVar[Counter[int]] = Counter()
    fails_at: ClassVar[int | None] = None

    def __init__(self, number: int, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Linear(width, width, dtype=torch.float64)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        Block.runs[self.number] += 1
        if self.number == Block.fails_at:
            raise ArithmeticError("as asked for")
        return x + torch.tanh(self.inner(self.drop(x)))


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    Block.runs.clear()
    Block.fails_at = None


def make(width: int = WIDTH, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(number, width, dropout) for number in range(NUM_LAYERS)))


def batches(count: int, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for _ in range(count)
    ]


def train(engine: RoundPipe, data: list[Tensor], config: RoundPipeRunConfig) -> list[float]:
    """A loss over the whole batch. How often each layer ran in the last step stays counted."""
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    losses = []
    for x in data:
        Block.runs.clear()
        out = engine(x, roundpipe_run_config=config)
        loss = 1e-3 * (out @ out.T).square().mean()
        loss.backward()
        losses.append(loss.item())
        engine.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    engine.synchronize()
    return losses


def plain(model: nn.Sequential, data: list[Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in data:
        out = model(x)
        loss = 1e-3 * (out @ out.T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def close(ours: Any, theirs: Any) -> None:
    """Gradients are summed in fp32."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def engine_on(count: int, model: nn.Module, num_bytes: int = 10**9) -> RoundPipe:
    """Devices that give late copies and fill freed slots with NaN, of which plans know a size."""
    devices = [AdversarialDevice(index, seed=index, num_bytes=num_bytes) for index in range(count)]
    return RoundPipe(model, devices=devices, optim_dtype=torch.float64)


both = pytest.mark.parametrize("count", [1, 3])
three = pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])


@three
def test_plain_numbers(count: int) -> None:
    model, oracle, data = make(), make(), batches(6)
    with engine_on(count, model) as engine:
        losses = train(engine, data, KEEP)
    close(losses, plain(oracle, data))
    close(weights(model), weights(oracle))


@both
def test_each_layer_runs_once_a_microbatch(count: int) -> None:
    with engine_on(count, make()) as engine:
        train(engine, batches(6), KEEP)
        assert set(Block.runs.values()) == {KEEP.num_microbatch}
        train(engine, batches(2), RoundPipeRunConfig(num_microbatch=4))
        assert set(Block.runs.values()) == {2 * KEEP.num_microbatch}


@both
def test_equal_to_the_bit_with_and_without(count: int) -> None:
    """Random streams are those of the recompute: the same masks."""
    ends = []
    for keeps in (True, False):
        model = make(dropout=0.3)
        with engine_on(count, model) as engine:
            torch.manual_seed(3)
            losses = train(
                engine, batches(6), RoundPipeRunConfig(keep_graphs=keeps, num_microbatch=4)
            )
        ends.append((losses, weights(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


@three
def test_other_calls_between_a_forward_and_its_backward(count: int) -> None:
    """They use the same layers, other slots, and leave the graphs alone."""
    model, oracle = make(), make()
    x, y = batches(2)
    with engine_on(count, model) as engine:
        train(engine, batches(4), KEEP)
        plain(oracle, batches(4))
        first = engine(x, roundpipe_run_config=KEEP)
        with torch.no_grad():
            seen = engine(y)
        second = engine(y, roundpipe_run_config=KEEP)
        engine.forward_backward((x,), label=y, loss_fn=lambda out, label: (out * label).sum())
        (first.square().sum() + second.sin().sum()).backward()
        gradients: list[Tensor] = []
        masters = list(engine.optim_parameters())
        engine.step(
            lambda: gradients.extend(m.grad.flatten().clone() for m in masters), is_async=False
        )
    with torch.no_grad():
        close(seen, oracle(y))
    oracle.zero_grad()
    ((oracle(x) * y).sum() + oracle(x).square().sum() + oracle(y).sin().sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    close(torch.cat(gradients), expected)


@three
def test_forwards_that_nobody_goes_backward_through(count: int) -> None:
    """Their slots come back, so there never are more than one of each layer."""
    model = make()
    with engine_on(count, model) as engine:
        train(engine, batches(5), KEEP)
        for x in batches(5):
            engine(x, roundpipe_run_config=KEEP)
        train(engine, batches(2), KEEP)
        most = sum(slot_bytes(sum(p.nbytes for p in block.parameters())) for block in model)
        assert max(engine.statistics()["slot_bytes"].values()) <= most


@three
def test_a_forward_that_fails_half_way(count: int) -> None:
    model, oracle = make(), make()
    with engine_on(count, model) as engine:
        train(engine, batches(4), KEEP)
        plain(oracle, batches(4))
        Block.fails_at = NUM_LAYERS - 1
        with pytest.raises(ArithmeticError):
            engine(batches(1)[0], roundpipe_run_config=KEEP)
        Block.fails_at = None
        losses = train(engine, batches(3), KEEP)
        assert set(Block.runs.values()) == {KEEP.num_microbatch}
    close(losses, plain(oracle, batches(3)))


@both
def test_what_memory_holds_is_kept_and_the_rest_made_again(count: int) -> None:
    """The deepest layers' graphs are."""
    model, oracle, data = make(width=128), make(width=128), batches(7, 128)
    layer_bytes = sum(p.nbytes for p in model[0].parameters())
    # Three have a layer's bytes more than they need, because gradients on their way down are there
    # for as long as a device takes that copies late.
    with engine_on(count, model, (12 if count == 1 else 8) * layer_bytes) as engine:
        losses = train(engine, data, KEEP)
        runs = [Block.runs[number] // KEEP.num_microbatch for number in range(NUM_LAYERS)]
    close(losses, plain(oracle, data))
    assert runs == sorted(runs, reverse=True)
    if count == 1:  # of three devices each has room for a third of the layers, and plans differ
        assert runs[0] == 2, runs
        assert runs[-1] == 1, runs


def test_a_model_that_writes_its_buffers_keeps_none() -> None:
    """The second microbatch would write to what the first one's graph has kept."""
    model = nn.Sequential(*make(), nn.BatchNorm1d(WIDTH, dtype=torch.float64), Block(NUM_LAYERS))
    with engine_on(1, model) as engine:
        train(engine, batches(5), KEEP)
        assert set(Block.runs.values()) == {2 * KEEP.num_microbatch}


def test_a_plan_of_the_users_own_is_left_as_it_is() -> None:
    plan = roundpipe.ModelExecutePlan([range(6)], [range(3, 6), range(3)])
    with engine_on(1, make()) as engine:
        train(engine, batches(5), RoundPipeRunConfig(keep_graphs=True, execute_plan=plan))
        assert set(Block.runs.values()) == {2 * 2}
