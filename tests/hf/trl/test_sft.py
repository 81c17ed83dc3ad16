"""`RoundPipeSFTTrainer` does what TRL's `SFTTrainer` does: the same losses, weights, metrics and
logged keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from trl import SFTConfig, SFTTrainer

from roundpipe.errors import ConfigError
from roundpipe_hf.trl import by_name
from roundpipe_hf.trl.sft import RoundPipeSFTConfig, RoundPipeSFTTrainer
from tests.support.example_data import save_tokenizer, sentences
from tests.support.trainers import QUIET_SGD, Pair, assert_same, assert_same_logs, logged, run

ROWS = Dataset.from_dict({"text": sentences(14)})
HELD_OUT = Dataset.from_dict({"text": sentences(5, seed=1)})
_PIPELINE = ("devices", "num_microbatch", "pin_model")
_OF_TRAINER = (
    "peft_config",
    "compute_loss_func",
    "compute_metrics",
    "eval_dataset",
    "processing_class",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=1,
        eos_token_id=2,
        attention_dropout=0.0,
    )
    return LlamaForCausalLM(config)


def make_trainer(
    cls: type, tokenizer: Any, rows: Dataset = ROWS, model: Any = None, **settings: Any
) -> Any:
    is_ours = issubclass(cls, RoundPipeSFTTrainer)
    given = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "num_train_epochs": 1,
        **QUIET_SGD,
        "bf16": False,
        "max_length": 16,
        "devices": 2,
    } | settings
    of_trainer = {"processing_class": tokenizer} | {
        name: given.pop(name) for name in _OF_TRAINER if name in given
    }
    if not is_ours:
        given = {name: value for name, value in given.items() if name not in _PIPELINE}
    args = (RoundPipeSFTConfig if is_ours else SFTConfig)(**given)
    torch.manual_seed(1)  # which adapters are drawn from
    return cls(make_model() if model is None else model, args, train_dataset=rows, **of_trainer)


def train_both(tokenizer: Any, rows: Dataset = ROWS, **settings: Any) -> Pair:
    pair = Pair(
        *(
            make_trainer(cls, tokenizer, rows, **settings)
            for cls in (RoundPipeSFTTrainer, SFTTrainer)
        )
    )
    for trainer in pair:
        run(trainer)
    return pair


def close(trainer: Any) -> None:
    trainer.model_wrapped.close()


LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
CASES: dict[str, dict[str, Any]] = {
    "full on one device": {"devices": 1},
    "full on three": {"devices": 3},
    "lora on one device": {"devices": 1, "peft_config": LORA},
    "lora on three": {"devices": 3, "peft_config": LORA},
    "accumulation": {"gradient_accumulation_steps": 2, "devices": 3},
    "dft": {"loss_type": "dft"},
    "packing": {
        "packing": True,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
    },
    "padding-free": {"padding_free": True, "max_length": None, "gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.2},
}
QUICK = ("accumulation", "packing")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=SLOW) for case in CASES]
)
def test_trains_as_the_plain_trainer(case: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every logged number, entropy and accuracy among them, and the weights. Batches have 3 rows of
    unequal length, cut into up to 3 microbatches."""
    pair = train_both(tokenizer, **CASES[case])
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= logged(pair.ours)[0].keys()
    assert_same(pair)
    close(pair.ours)


@pytest.mark.slow
def test_only_completions_count(tokenizer: PreTrainedTokenizerBase) -> None:
    """Some microbatches have no label that counts."""
    rows = Dataset.from_dict(
        {"prompt": sentences(7), "completion": ["the cat .", "", "a dog", "", "", "red", ""]}
    )
    pair = train_both(tokenizer, rows, num_microbatch=3)
    assert_same(pair)
    close(pair.ours)


@pytest.mark.slow
def test_a_loss_function_of_the_users_gets_logits(tokenizer: PreTrainedTokenizerBase) -> None:
    """And the metrics are there all the same."""

    def squared_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        valid = labels[:, 1:].ne(-100).unsqueeze(-1)
        return (outputs.logits[:, :-1].square() * valid).sum() / (num_items_in_batch or valid.sum())

    pair = train_both(tokenizer, compute_loss_func=squared_loss)
    assert_same(pair)
    close(pair.ours)


@pytest.mark.parametrize("wants", ["loss", pytest.param("logits", marks=SLOW)])
def test_evaluates_as_the_plain_trainer(wants: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Alone, before anything is trained, and between epochs."""

    def compute_metrics(prediction: Any) -> dict[str, float]:
        return {"largest": float(prediction.predictions.max())}

    plan_key = {"compute_metrics": compute_metrics} if wants == "logits" else {}
    settings = {"eval_dataset": HELD_OUT, "eval_strategy": "epoch", **plan_key}
    pair = Pair(
        *(make_trainer(cls, tokenizer, **settings) for cls in (RoundPipeSFTTrainer, SFTTrainer))
    )
    alone = [[without_clock(trainer.evaluate())] for trainer in pair]
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy"} <= alone[0][0].keys()
    assert_same_logs(*alone)
    assert_same_logs(logged(run(pair.ours)), logged(run(pair.plain)))
    close(pair.ours)


def without_clock(metrics: dict[str, float]) -> dict[str, float]:
    of_the_clock = ("_runtime", "_per_second", "_preparation_time")
    return {"step": 0} | {
        name: value for name, value in metrics.items() if not name.endswith(of_the_clock)
    }


@pytest.mark.slow
def test_logits_never_exist_as_a_whole(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in training nor in evaluation: the head is not called, only read."""
    trainer = make_trainer(RoundPipeSFTTrainer, tokenizer, eval_dataset=HELD_OUT)
    trainer.model.lm_head.register_forward_hook(lambda *_: pytest.fail("the head made logits"))
    run(trainer)
    trainer.evaluate()
    close(trainer)


@pytest.mark.slow
def test_generates_after_training(tokenizer: PreTrainedTokenizerBase) -> None:
    """The model is as it came: TRL's patch of its forward is gone."""
    trainer = make_trainer(RoundPipeSFTTrainer, tokenizer)
    assert "forward" not in vars(trainer.model)
    run(trainer)
    ids = torch.tensor([[3, 4, 5]])
    generated = trainer.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False
    )
    assert generated.shape[1] > 3
    close(trainer)


@pytest.mark.slow
def test_takes_the_name_of_a_model(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the dtype of its files, which is said, with its tokenizer, its weights left in the
    file."""
    make_model().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    trainer = make_trainer(
        RoundPipeSFTTrainer,
        None,
        model=str(tmp_path / "model"),
        pin_model="off",
        peft_config=LORA,
        max_steps=1,
    )
    assert trainer.model.get_base_model().lm_head.weight.dtype == torch.bfloat16
    assert "is loaded in bfloat16, the dtype of its files. TRL would load float32" in caplog.text
    run(trainer)
    close(trainer)


class NoPreset(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.slow
def test_a_model_without_preset_trains_on_logits(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(
        *(
            make_trainer(cls, tokenizer, model=NoPreset(make_model().config), seed=5)
            for cls in (RoundPipeSFTTrainer, SFTTrainer)
        )
    )
    pair.plain.model.load_state_dict(pair.ours.model.state_dict())
    assert "NoPreset has no preset of its own" in caplog.text
    for trainer in pair:
        run(trainer)
    assert_same(pair)
    close(pair.ours)


def test_what_cannot_work_is_refused_with_a_reason(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="activation offloading"):
        make_trainer(RoundPipeSFTTrainer, tokenizer, activation_offloading=True)


def test_the_tokenizer_of_the_revision_that_the_model_has(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was that of the newest, whose ids are others. And the log says which dtype was loaded,
    where TRL would load another."""
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    asked: dict[str, Any] = {}

    def from_pretrained(name: str, **kwargs: Any) -> Any:
        asked.update(kwargs, name=name)
        return tokenizer

    monkeypatch.setattr(by_name.AutoProcessor, "from_pretrained", from_pretrained)
    trainer = make_trainer(
        RoundPipeSFTTrainer,
        None,
        model=str(tmp_path),
        model_init_kwargs={"revision": "old"},
    )
    assert asked["revision"] == "old"
    assert asked["name"] == str(tmp_path)
    assert trainer.processing_class is tokenizer
    assert "is loaded in bfloat16" in caplog.text
