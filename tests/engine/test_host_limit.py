"""`max_host_memory`: what is for speed only is left out, kept inputs become fewer, and what cannot
fit is refused."""

from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.autoplan import host_room
from roundpipe.autoplan.host_room import HostRoom
from roundpipe.errors import ConfigError
from roundpipe.params.dtypes import GradientRules
from roundpipe.step import write_back
from tests.support.device_sets import ONE
from tests.support.engines import Engines, train_steps
from tests.support.models import make_mlp, mlp_batch

WIDTH, LAYERS = 32, 24
BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(3)]


def make_deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def test_second_copies_are_left_out(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    monkeypatch.setattr(write_back, "free_host_bytes", lambda: 1 << 60)
    monkeypatch.setattr(write_back, "resident_bytes", lambda: 10**9)
    made = {}
    for limit in ("2GB", "1GB"):
        engine = engines(make_mlp(), ONE, max_host_memory=limit)
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)
        losses = train_steps(engine, optimizer, BATCHES, 2, is_async=True)
        engine.synchronize()
        made[limit] = engine.statistics()["second_buffer_bytes"], torch.stack(losses)
    assert made["2GB"][0] > 0
    assert made["1GB"][0] == 0
    assert torch.equal(made["1GB"][1], made["2GB"][1])


def test_less_than_is_needed_is_refused_before_anything_is_moved() -> None:
    model = make_deep()
    count = sum(parameter.numel() for parameter in model.parameters())
    before = [parameter.data_ptr() for parameter in model.parameters()]
    needed = f"{12 * count / 1e9:.4g} GB"
    with pytest.raises(ConfigError, match=f"max_host_memory is 0.0002 GB, and {needed} are needed"):
        roundpipe.RoundPipe(model, devices=roundpipe.virtual(1), max_host_memory="200KB")
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


WEIGHT = 4 * 100 * 100


def make_room(**settings: Any) -> HostRoom:
    weights = [nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(9), False)]
    return HostRoom(10e6, weights, GradientRules(None, None), **settings)


def test_what_steps_will_make_is_left_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients, masters, and moments as AdamW makes them. Beside the first update, which makes
    some of it, what was found before counts."""
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: 1 << 60)
    resident = 6_000_000
    monkeypatch.setattr(host_room, "resident_bytes", lambda: resident)
    room, everything = make_room(), 5_000_000
    assert room.for_inputs(10**6, has_masters=False, has_stepped=False) == everything - 4 * WEIGHT
    assert room.for_inputs(10**6, has_masters=True, has_stepped=False) == everything - 3 * WEIGHT
    resident += WEIGHT
    assert room.for_inputs(10**6, has_masters=True, has_stepped=True) == everything - 3 * WEIGHT
    room.note_update(1.0)
    assert room.for_inputs(10**6, has_masters=True, has_stepped=True) == everything - WEIGHT


def test_of_several_ranks_each_has_a_share_of_what_optimizers_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the others' weights, which here are as wide as masters."""
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: 1 << 60)
    monkeypatch.setattr(host_room, "resident_bytes", lambda: 0)
    room = make_room(num_ranks=4)
    left = room.for_inputs(0, has_masters=False, has_stepped=False)
    assert left == 10e6 - WEIGHT - WEIGHT - 2 * WEIGHT // 4
    weight = nn.Parameter(torch.zeros(100, 100, dtype=torch.bfloat16))
    rules = GradientRules(torch.float32, None)
    assert HostRoom(10e6, [weight], rules).masters == WEIGHT
    assert HostRoom(10e6, [weight], rules, num_ranks=4).masters == WEIGHT // 4 + 3 * WEIGHT // 8


def test_the_first_update_is_waited_for_before_moments_count_as_there(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: 1 << 60)
    monkeypatch.setattr(host_room, "resident_bytes", lambda: 10**6)
    engine, goes_on, left = engines(make_mlp(), ONE, max_host_memory="1GB"), Event(), []
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=0.01)

    def step() -> None:
        optimizer.step()
        assert goes_on.wait(20)

    (x,), _, y, loss_fn = BATCHES[0]
    engine.forward_backward((x,), label=y, loss_fn=loss_fn)
    left.append(engine._host._input_room())
    engine.step(step)
    left.append(engine._host._input_room())
    goes_on.set()
    engine.synchronize()
    left.append(engine._host._input_room())
    trained = 4 * sum(parameter.numel() for parameter in engine.model.parameters())
    assert left == [10**9 - 10**6 - 3 * trained] * 2 + [10**9 - 10**6]


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_host_memory is 'much'"):
        roundpipe.RoundPipe(make_deep(), devices=roundpipe.virtual(1), max_host_memory="much")
