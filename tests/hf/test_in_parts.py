"""Models without a preset that are no sequence train and evaluate through their parts, as the plain Trainer does it."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from branching import bert_batch, make_bert, make_t5, t5_batch
from hf.trainers import assert_same, assert_same_logs, logged, make_both, train_both
from roundpipe import AutoRoundPipe


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The batch, row by row."""
    columns = batch(rows=6).kwargs
    return [{name: value[row] for name, value in columns.items()} for row in range(6)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {"bert": (make_bert, bert_batch), "t5": (make_t5, t5_batch)}
either = pytest.mark.parametrize("name", MODELS)


@either
def test_training(name: str) -> None:
    """Accumulation over two uneven batches, clipping, three devices: the same losses, norms and weights."""
    make, batch = MODELS[name]
    pair = train_both(
        make, rows_of(batch), gradient_accumulation_steps=2, per_device_train_batch_size=2, num_train_epochs=2
    )
    assert isinstance(pair.ours._engine(), AutoRoundPipe)
    assert_same(pair)


@either
def test_evaluation(name: str) -> None:
    """The mean of the batches' losses, with the outputs wanted and without; predictions are the model's."""
    make, batch = MODELS[name]
    for prediction_loss_only in (False, True):
        pair = make_both(
            make,
            rows_of(batch),
            eval_dataset=rows_of(batch)[:5],
            per_device_eval_batch_size=2,
            prediction_loss_only=prediction_loss_only,
        )
        for trainer in pair:
            trainer.evaluate()
        assert_same_logs(logged(pair.ours), logged(pair.plain))
