"""Models without a preset that are no sequence train and evaluate through their parts, as the plain
Trainer does it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from roundpipe import AutoRoundPipe, wrap_model_to_roundpipe
from roundpipe_hf import RoundPipeTrainer
from tests.support.branching import bert_batch, make_bert, t5_batch
from tests.support.encoder_decoder_models import make
from tests.support.models import make_llama
from tests.support.trainers import (
    Pair,
    assert_same,
    assert_same_logs,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
    train_both,
)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """The batch, row by row."""
    columns = batch(rows=6).kwargs
    return [{name: value[row] for name, value in columns.items()} for row in range(6)]


def make_bart() -> Any:
    """Its forward might skip a block, so it has no preset; but it is not going to happen."""
    return make("bart", encoder_layerdrop=1e-9)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "bert": (make_bert, bert_batch),
    "bart": (make_bart, t5_batch),
}
either = pytest.mark.parametrize("name", MODELS)


@either
def test_training(name: str) -> None:
    """Accumulation over two uneven batches, clipping, three devices: the same losses, norms and
    weights."""
    make, batch = MODELS[name]
    pair = train_both(
        make,
        rows_of(batch),
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        num_train_epochs=2,
    )
    assert isinstance(pair.ours._engine(), AutoRoundPipe)
    assert_same(pair)


@either
def test_evaluation(name: str) -> None:
    """The mean of the batches' losses, with the outputs wanted and without; predictions are the
    model's."""
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


class OfHiddenStates:
    """What a preset cannot do: an output of every block, and a hook on the model itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs.loss + outputs.hidden_states[-2].square().mean()
        return (loss, outputs) if return_outputs else loss


def doubled(module: nn.Module, args: Any, outputs: Any) -> Any:
    outputs.loss = outputs.loss * 2
    return outputs


def make_hooked() -> Any:
    model = make_llama(tied=True)
    model.register_forward_hook(doubled)
    return model


def test_a_model_with_a_preset_that_is_wanted_in_parts() -> None:
    """A trainer takes the engine in the model's place."""
    engine = wrap_model_to_roundpipe(
        make_hooked(),
        use_sequential_preset=False,
        devices=2,
        optim_dtype=torch.float32,
        lower_threshold=1,
    )
    ours, plain = (type("Mixed", (OfHiddenStates, cls), {}) for cls in (RoundPipeTrainer, Trainer))
    rows: Any = token_rows(10)
    pair = Pair(
        run(make_trainer(ours, engine, rows, gradient_accumulation_steps=2, eval_dataset=rows[:4])),
        run(
            make_trainer(
                plain, make_hooked(), rows, gradient_accumulation_steps=2, eval_dataset=rows[:4]
            )
        ),
    )
    assert isinstance(engine, AutoRoundPipe)
    assert_same(pair)
    ours_loss, plain_loss = (trainer.evaluate()["eval_loss"] for trainer in pair)
    assert ours_loss == pytest.approx(plain_loss, abs=1e-6)
    engine.close()


class Penalises:
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss + 0.01 * sum(p.square().sum() for p in model.parameters())


def test_a_penalty_on_weights() -> None:
    """Its gradient went to the model's own weights, which nobody steps, and nothing was said."""
    assert_same(train_both(make_bert, rows_of(bert_batch), Penalises))
