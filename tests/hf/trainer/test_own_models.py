"""Models of a known architecture on which users have put something of their own train as in the
plain `Trainer`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.support.models import make_llama
from tests.support.trainers import assert_same, differ, run, token_rows, train_both, weights

ROWS = token_rows(12)


class LowerInEvaluation(LlamaForCausalLM):
    """Keeps its lower blocks, which drop half of what they attend to, in evaluation mode."""

    def train(self, mode: bool = True) -> "LowerInEvaluation":
        super().train(mode)
        for block in self.model.layers[:2]:
            block.eval()
        return self


@pytest.mark.parametrize("devices", [1, 3])
def test_a_model_that_keeps_some_modules_in_evaluation_mode(devices: int) -> None:
    """It does so from the first step on, though a new model's modules are all in training mode."""

    def make() -> nn.Module:
        model: Any = make_llama(tied=False)
        for block in model.model.layers[:2]:
            block.self_attn.attention_dropout = 0.5
        model.__class__ = LowerInEvaluation
        return model  # type: ignore[no-any-return]

    more: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": ROWS[:5]}
    pair = train_both(make, ROWS, devices=devices, gradient_accumulation_steps=2, **more)
    assert_same(pair)
    for trainer in pair:
        modes = [block.training for block in trainer.model.train().model.layers]
        assert modes == [False, False] + [True] * (len(modes) - 2)


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def knows_no_items(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return 2 * token_mean(logits, labels)


def never_reads_items(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    return 2 * token_mean(logits, labels)


def hands_items_on(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return 2 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)


def divides_by_items(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    targets = labels[:, 1:].flatten()
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets, reduction="none", ignore_index=-100
    )
    items = targets.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
    return losses.sum() / items


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    "loss", [knows_no_items, never_reads_items, hands_items_on, divides_by_items]
)
def test_a_loss_function_of_the_models_own(loss: Callable[..., Tensor], devices: int) -> None:
    """The Trainer tells it how many items a window has. What does not divide by them is a mean over
    its batch, and no sum over microbatches."""

    def make() -> nn.Module:
        model: Any = make_llama(tied=False)
        model.loss_function = loss
        return model  # type: ignore[no-any-return]

    more: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": ROWS[:5]}
    pair = train_both(
        make, ROWS, devices=devices, num_microbatch=3, gradient_accumulation_steps=2, **more
    )
    assert_same(pair)
    assert torch.tensor(pair.ours.state.log_history[0]["loss"]) > 1.0


@pytest.mark.parametrize("devices", [1, 3])
def test_new_tokens_of_a_model_with_tied_embeddings(devices: int) -> None:
    """PEFT trains some rows of the embedding and uses them in the head as well, which is another
    layer. The adapter is switched off for an evaluation, and merged for a second run."""

    def make() -> nn.Module:
        model: Any = make_llama(tied=True)
        torch.manual_seed(5)  # which new rows and adapters are drawn from
        model.resize_token_embeddings(70)
        config = LoraConfig(
            r=4, target_modules="all-linear", trainable_token_indices=list(range(58, 70))
        )
        return get_peft_model(model, config)

    more: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": ROWS[:5]}
    rows = [row | {"input_ids": row["input_ids"] + 6} for row in ROWS]
    pair = train_both(make, rows, devices=devices, gradient_accumulation_steps=2, **more)
    assert_same(pair)
    before = dict(make().named_parameters())
    trained = differ(weights(pair.ours), {name: value.detach() for name, value in before.items()})
    assert sum("trainable_tokens_delta" in name for name in trained) == 1
    for trainer in pair:
        with trainer.model.disable_adapter():
            trainer.evaluate()
        merged = trainer.model.merge_and_unload().requires_grad_(True)
        trainer.model, trainer.optimizer, trainer.lr_scheduler = merged, None, None
        run(trainer)
    assert_same(pair)
