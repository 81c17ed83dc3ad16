"""A lone virtual device cut every batch in two and took twice the plain Trainer's time.

Cutting keeps several devices busy, hides copies behind another microbatch's work, and spares a
device's memory. A single device of the CPU without a limit has none of the three.
"""

from typing import Any

import pytest
import torch

from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    assert_same,
    token_rows,
    train_both,
    trained,
)

ROWS = token_rows(12)


def forwards_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of microbatches that calls are made in, as they come."""
    seen: list[int] = []
    forward_backward = RoundPipe.forward_backward

    def noted(self: RoundPipe, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs["microbatches"]))
        return forward_backward(self, *args, **kwargs)

    monkeypatch.setattr(RoundPipe, "forward_backward", noted)
    return seen


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"devices": 1}, 2),
        ({"devices": None}, 2),
        ({"devices": 3}, 4),
        ({"devices": 4}, 6),  # five cannot be shared by two batches
        ({"devices": 1, "num_microbatch": 2}, 4),
        ({"devices": 1, "max_gpu_memory": "1GB"}, 2),
    ],
    ids=["one", "default", "three", "four", "said", "limited"],
)
def test_a_window_has_what_its_devices_want(
    settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches to a window, which share the microbatches that devices want. What the user says
    wins, for each batch.

    Each batch was cut into as many as devices wanted: with one GPU and four batches to a window
    those were eight, and a step took 7 to 15 % longer.
    """
    seen = forwards_of(monkeypatch)
    pair = train_both(MODELS["full"], ROWS, gradient_accumulation_steps=2, **settings)
    assert set(seen) == {expected}
    assert_same(pair)


@pytest.mark.parametrize("said", [None, 3])
def test_an_engine_of_the_users_is_as_they_made_it(
    said: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's own default stays one more microbatch than devices."""
    seen = forwards_of(monkeypatch)
    engine = wrap_model_to_roundpipe(
        MODELS["full"](),
        devices=1,
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=said),
    )
    with engine:
        trained(RoundPipeTrainer, engine, ROWS)
    assert set(seen) == {said or 2}
