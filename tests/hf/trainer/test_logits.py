"""Logits of a step exist only where somebody reads them: they are the largest tensors of a small
model's training."""

from typing import Any

import pytest
from torch import Tensor

import roundpipe.presets.loss
from tests.support.trainers import MODELS, assert_same, token_rows, train_both


class Penalised:
    """Reads what the model returns beside its loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        loss = loss + 0.01 * outputs.logits.square().mean() / kwargs["num_items_in_batch"]
        return (loss, outputs) if return_outputs else loss


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every loss that was made without all its logits."""
    rows: list[int] = []
    make = roundpipe.presets.loss.linear_cross_entropy

    def noted(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(len(hidden))
        return make(hidden, *args, **kwargs)

    monkeypatch.setattr(roundpipe.presets.loss, "linear_cross_entropy", noted)
    return rows


def test_trainers_own_loss_needs_none(chunked: list[int]) -> None:
    rows = token_rows(6)
    pair = train_both(MODELS["full"], rows)
    assert sum(chunked) == len(rows)
    assert_same(pair)
    chunked.clear()
    losses = [trainer.evaluate(rows)["eval_loss"] for trainer in pair]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert sum(chunked) == len(rows)


def test_a_loss_that_reads_them_gets_them(chunked: list[int]) -> None:
    pair = train_both(MODELS["full"], token_rows(3), mixin=Penalised, num_microbatch=1)
    assert chunked == []
    assert_same(pair)
