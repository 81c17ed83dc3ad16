"""`max_host_memory`: what is for speed only is left out, kept inputs become fewer, and what cannot
fit is refused."""

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


@pytest.mark.parametrize(
    ("has_stepped", "left"), [(True, 5_000_000), (False, 5_000_000 - 4 * 4 * 100 * 100)]
)
def test_what_steps_will_make_is_left_room_for(
    has_stepped: bool, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, masters, and moments as AdamW makes them."""
    monkeypatch.setattr(host_room, "free_host_bytes", lambda: 1 << 60)
    monkeypatch.setattr(host_room, "resident_bytes", lambda: 6_000_000)
    weights = [nn.Parameter(torch.zeros(100, 100)), nn.Parameter(torch.zeros(9), False)]
    room = HostRoom(10e6, weights, GradientRules(None, None))
    assert room.for_inputs(1_000_000, has_stepped=has_stepped) == left


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_host_memory is 'much'"):
        roundpipe.RoundPipe(make_deep(), devices=roundpipe.virtual(1), max_host_memory="much")
