"""The first step on long sequences ran out of memory that a smaller stage would have left.

A first plan guessed activations for 8,192 tokens, whatever came. Where not even that fitted, it put
all layers into one stage, which needs most. And what was measured on one microbatch stood for all
within a fifth of its size.
"""

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe
from roundpipe.device.virtual import VirtualDevice
from roundpipe.errors import PlanError
from tests.support.engines import Engines


def loss_fn(outputs: torch.Tensor, labels: Any) -> torch.Tensor:
    return outputs.square().sum()


def test_plans_are_told_how_long_a_microbatch_is(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)))
    told: dict[str, Any] = {}
    plan = engine.planner.plan
    monkeypatch.setattr(
        engine.planner, "plan", lambda *args, **kwargs: told.update(kwargs) or plan(*args, **kwargs)
    )
    engine.forward_backward((torch.zeros(6, 7, dtype=torch.int64),), loss_fn=loss_fn)
    assert (told["elements"], told["tokens"]) == (21, 21)


def test_a_longer_microbatch_is_planned_with_more_than_a_shorter_one_took(engines: Engines) -> None:
    engine = engines(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    kept = []
    for rows in (200, 212):
        engine.forward_backward((torch.randn(rows, 4),), loss_fn=loss_fn)
        kept.append(engine.planner.measured().costs().saved_bytes[1])
    assert kept == [4 * 4 * 100, 4 * 4 * 106]


def test_what_is_known_exactly_may_fill_the_device(engines: Engines) -> None:
    """Room for activations that nobody has seen yet is no reason to refuse slots and sums that
    fit."""
    layers = [nn.Linear(64, 64) for _ in range(4)]  # 16 KiB each
    device = VirtualDevice(0, 120 * 1024)
    with RoundPipe(nn.Sequential(*layers), devices=[device]) as engine:
        engine.forward_backward((torch.randn(4, 64),), loss_fn=loss_fn)
    with (
        RoundPipe(nn.Sequential(*layers), devices=[VirtualDevice(0, 70 * 1024)]) as engine,
        pytest.raises(PlanError, match=r"63 KiB is allowed"),
    ):
        engine.forward_backward((torch.randn(4, 64),), loss_fn=loss_fn)
