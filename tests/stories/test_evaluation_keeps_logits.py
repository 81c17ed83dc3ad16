"""Evaluation that only wants the loss held all logits, though each stage's outputs are gone after
its loss.

The story: outputs come back to the host anyway, so keeping them looks free; over a vocabulary of
32,000 and a few thousand tokens it is gigabytes. Here every microbatch's logits are watched: the
last ones must be gone before the next are made, whichever way the loss alone is asked for.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EvalPrediction, Trainer

from roundpipe_hf import RoundPipeTrainer, loss_reduction
from tests.support.models import make_llama
from tests.support.trainers import make_trainer, run, token_rows

ROWS = token_rows(8)


class Watched(RoundPipeTrainer):
    """Counts how many logits are alive when a loss is made, and how many there were."""

    @loss_reduction("sum")
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        if not hasattr(self, "watched"):
            self.watched: list[weakref.ref[torch.Tensor]] = []
            self.most_alive = 0
        self.watched.append(weakref.ref(outputs.logits))
        self.most_alive = max(self.most_alive, sum(logits() is not None for logits in self.watched))
        assert model.training or not outputs.logits.requires_grad
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def count(prediction: EvalPrediction) -> dict[str, float]:
    assert prediction.predictions.shape == (8, 12)
    return {"rows": float(len(prediction.predictions))}


WAYS: dict[str, dict[str, Any]] = {
    "no metrics": {},
    "loss only": {"compute_metrics": count, "prediction_loss_only": True},
    "reduced": {
        "compute_metrics": count,
        "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1),
    },
    "accumulated": {
        "compute_metrics": count,
        "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1),
        "eval_accumulation_steps": 1,
    },
}


@pytest.mark.parametrize(
    "way", ["no metrics", *(pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[1:])]
)
def test_logits_are_gone_with_their_loss(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways give the plain loss; where only that is wanted, one microbatch's logits are alive at
    a time."""
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "eval_dataset": ROWS,
        "per_device_eval_batch_size": 4,
        "devices": 1,
    } | WAYS[way]
    trainer = make_trainer(
        Watched, make_llama(tied=False), ROWS, num_microbatch=4, max_steps=1, **settings
    )
    run(trainer)
    trainer.evaluate()  # the first looks whether the declaration fits, with logits of its own
    trainer.watched.clear()
    trainer.most_alive = 0
    evaluated = trainer.evaluate()
    if way in ("no metrics", "loss only"):
        assert len(trainer.watched) == 8, "each row is a microbatch of its own"
        assert trainer.most_alive == 1
    plain = make_trainer(Trainer, trainer.model, ROWS, **settings)
    assert evaluated["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    trainer.train()
    assert trainer.model.training
    trainer.model_wrapped.close()
