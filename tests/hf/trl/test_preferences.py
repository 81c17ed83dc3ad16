"""DPO, KTO and reward models do what TRL's trainers do: the same losses, weights, metrics and
logged keys."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from roundpipe import AutoRoundPipe
from roundpipe.errors import ConfigError
from roundpipe_hf.trl import (
    RoundPipeDPOConfig,
    RoundPipeDPOTrainer,
    RoundPipeKTOConfig,
    RoundPipeKTOTrainer,
    RoundPipeRewardConfig,
    RoundPipeRewardTrainer,
)
from tests.support.example_data import save_tokenizer, sentences
from tests.support.trainers import QUIET_SGD, Pair, assert_same, assert_same_logs, logged, run

PROMPTS, CHOSEN, REJECTED = sentences(8), sentences(8, seed=1), sentences(8, seed=2)
PAIRS = Dataset.from_dict({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED})
RATED = Dataset.from_dict(
    {"prompt": PROMPTS, "completion": CHOSEN, "label": [row % 3 != 1 for row in range(8)]}
)
_PIPELINE = ("devices", "num_microbatch", "pin_model")
_OF_TRAINER = ("peft_config", "eval_dataset", "ref_model")
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
KINDS: dict[str, tuple[tuple[type, type], tuple[type, type], Dataset]] = {
    "dpo": ((RoundPipeDPOTrainer, DPOTrainer), (RoundPipeDPOConfig, DPOConfig), PAIRS),
    "kto": ((RoundPipeKTOTrainer, KTOTrainer), (RoundPipeKTOConfig, KTOConfig), RATED),
    "reward": (
        (RoundPipeRewardTrainer, RewardTrainer),
        (RoundPipeRewardConfig, RewardConfig),
        PAIRS,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its tokenizer, because TRL loads reference models by name."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    make_model().save_pretrained(folder)
    return folder


def config() -> LlamaConfig:
    return LlamaConfig(
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
        num_labels=1,
    )


def make_model(cls: type = LlamaForCausalLM, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return cls(config())


def make_one(kind: str, is_ours: bool, folder: Path, model: Any, **settings: Any) -> Any:
    trainers, configs, rows = KINDS[kind]
    given = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        **QUIET_SGD,
        "bf16": False,
        "max_length": 24,
        "devices": 3,
    } | settings
    of_trainer = {name: given.pop(name) for name in _OF_TRAINER if name in given}
    if not is_ours:
        given = {name: value for name, value in given.items() if name not in _PIPELINE}
    torch.manual_seed(1)  # which adapters are drawn from
    return trainers[0 if is_ours else 1](
        model,
        args=configs[0 if is_ours else 1](**given),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder),
        **of_trainer,
    )


def make_both(kind: str, folder: Path, make: Any = make_model, **settings: Any) -> Pair:
    with_reference = settings.pop("reference", False)

    def one(is_ours: bool) -> Any:
        more = {"ref_model": make_model(seed=3)} if with_reference else {}
        return make_one(kind, is_ours, folder, make(), **settings, **more)

    return Pair(one(True), one(False))


def trained(*args: Any, **settings: Any) -> Pair:
    return Pair(*map(run, make_both(*args, **settings)))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_all_weights_with_a_reference_model(kind: str, devices: int, folder: Path) -> None:
    assert_same(
        trained(
            kind, folder, reference=True, devices=devices, eval_dataset=KINDS[kind][2], max_steps=2
        )
    )


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_adapters_and_the_model_without_them(kind: str, folder: Path) -> None:
    """Accumulation, and evaluation in between."""
    pair = trained(
        kind,
        folder,
        peft_config=LORA,
        eval_dataset=KINDS[kind][2],
        eval_strategy="steps",
        eval_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    assert_same(pair)


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_an_adapter_that_was_trained_before(kind: str, folder: Path) -> None:
    """TRL keeps a copy of it, named ref."""

    def adapted() -> Any:
        model = make_model()
        torch.manual_seed(5)
        model = get_peft_model(model, LORA)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        return model

    assert_same(trained(kind, folder, adapted))


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_reference_computed_beforehand(kind: str, folder: Path) -> None:
    assert_same(trained(kind, folder, reference=True, precompute_ref_log_probs=True))


# Full and LoRA, on one device and on three.
GRID = [
    pytest.param(adapts, devices, marks=pytest.mark.slow)
    for adapts in (False, True)
    for devices in (1, 3)
]
grid = pytest.mark.parametrize(("adapts", "devices"), GRID)


@grid
@pytest.mark.parametrize(
    "loss_type",
    [
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "sft",
        "sigmoid_norm",
        "sigmoid sft",
    ],
)
def test_every_loss_of_dpo(loss_type: str, adapts: bool, devices: int, folder: Path) -> None:
    """And two of them at once."""
    smoothing = 0.1 if loss_type in ("exo_pair", "robust") else 0.0
    settings = {"loss_type": loss_type.split(), "label_smoothing": smoothing, "max_steps": 2}
    assert_same(trained("dpo", folder, devices=devices, **settings, **adapters(adapts)))


def adapters(adapts: bool) -> dict[str, Any]:
    """Adapters, or all weights and a reference model."""
    return {"peft_config": LORA} if adapts else {"reference": True}


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_other_divergences_of_dpo(divergence: str, folder: Path) -> None:
    assert_same(trained("dpo", folder, peft_config=LORA, f_divergence_type=divergence, max_steps=2))


@grid
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_every_loss_of_kto(loss_type: str, adapts: bool, devices: int, folder: Path) -> None:
    settings = {"loss_type": loss_type, "max_steps": 2, "devices": devices}
    assert_same(trained("kto", folder, **settings, **adapters(adapts)))


def test_weighting_and_length_desensitization(folder: Path) -> None:
    assert_same(trained("dpo", folder, peft_config=LORA, use_weighting=True, ld_alpha=0.5))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("adapts", [False, True])
def test_a_reward_model(adapts: bool, devices: int, folder: Path) -> None:
    more = {}
    if adapts:
        more["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["score"]
        )
    pair = trained(
        "reward",
        folder,
        lambda: make_model(LlamaForSequenceClassification),
        eval_dataset=PAIRS,
        gradient_accumulation_steps=2,
        devices=devices,
        **more,
    )
    assert isinstance(pair.ours._engine(), AutoRoundPipe)
    assert_same(pair)
    for trainer in pair:
        trainer.evaluate()
    assert_same_logs(logged(pair.ours)[-1:], logged(pair.plain)[-1:])


def test_a_model_by_its_name(folder: Path) -> None:
    """And TRL's reference, which it loads by the same name."""
    trainer = make_one("dpo", True, folder, str(folder), max_steps=1)
    run(trainer)
    assert trainer.ref_model is not None
    assert_same(
        Pair(trainer, run(make_one("dpo", False, folder, str(folder), max_steps=1))), atol=1e-5
    )


def test_a_reference_that_follows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="sync_ref_model"):
        make_one("dpo", True, folder, make_model(), sync_ref_model=True)


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_loss_that_runs_again_counts_once(kind: str, folder: Path) -> None:
    """The second batch of a window runs out of memory when both have been counted."""
    pair = make_both(kind, folder, reference=True, gradient_accumulation_steps=2, max_steps=2)
    inner, calls = pair.ours.compute_loss, list[Any]()

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        loss = inner(*args, **kwargs)
        calls.append(loss)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("as asked for")
        return loss

    pair.ours.compute_loss = compute_loss
    assert_same(Pair(*map(run, pair)))
    assert len(calls) == 2 * 2 + 2
