"""The example scripts run on tiny models made offline, and with the plain `Trainer` in its place
train the same."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Qwen3Config,
    Trainer,
    TrainingArguments,
)
from trl import DPOTrainer as PlainDPOTrainer
from trl import GRPOTrainer as PlainGRPOTrainer
from trl import SFTConfig
from trl import SFTTrainer as PlainSFTTrainer

import dpo
import grpo
import run_clm
import run_image_classification
import sft
from fetch_assets import IndexUnreachableError, smollm2_folder, wiki_summaries
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments
from roundpipe_hf.trl.sft import RoundPipeSFTConfig
from tests.support import ROOT
from tests.support.example_data import LLAMA, QUIET, save_images, save_tokenizer, sentences

VIT = [
    *("--model_type", "vit", "--image_size", "8", "--config_overrides"),
    "hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,patch_size=4",
]

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def clm(folder: Path, *flags: str) -> list[str]:
    """Flags of a short run of run_clm on 60 sentences."""
    (folder / "train.txt").write_text("\n".join(sentences(60)))
    (folder / "held-out.txt").write_text("\n".join(sentences(20, seed=1)))
    return [
        *(
            "--train_file",
            str(folder / "train.txt"),
            "--validation_file",
            str(folder / "held-out.txt"),
        ),
        *("--tokenizer_name", str(save_tokenizer(folder / "tokenizer"))),
        *("--do_train", "--do_eval", "--block_size", "16", "--per_device_train_batch_size", "4"),
        *(
            "--learning_rate",
            "1e-2",
            "--num_train_epochs",
            "2",
            "--output_dir",
            str(folder / "out"),
        ),
        *QUIET,
        *flags,
    ]


def both_ways(
    module: Any, flags: list[str], monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """The script's metrics, and those after the one change its comments promise: the Trainer's
    name."""
    results = []
    for cls in (RoundPipeTrainer, Trainer):
        monkeypatch.setattr(module, "RoundPipeTrainer", cls)
        results.append({key: value for key, value in module.main(flags).items() if key in keys})
    return results[0], results[1]


def test_run_clm_trains_as_with_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From scratch, on text files; what it saves is a model that transformers loads."""
    keys = ["train_loss", "eval_loss", "perplexity"]
    ours, plain = both_ways(run_clm, clm(tmp_path, *LLAMA, "--devices", "2"), monkeypatch, keys)
    assert sorted(ours) == sorted(keys)
    assert ours == pytest.approx(plain, abs=1e-4)
    metrics = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert metrics["eval_loss"] == plain["eval_loss"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hidden_size == 16


@pytest.mark.slow
def test_run_clm_trains_adapters_on_mapped_weights_and_resumes(tmp_path: Path) -> None:
    """LoRA on weights that stay in their file; stopped half way and resumed it ends where the whole
    run ends."""
    run_clm.main(clm(tmp_path, *LLAMA, "--max_steps", "1"))
    base = str((tmp_path / "out").rename(tmp_path / "base"))
    lora = [
        "--model_name_or_path",
        base,
        "--lora_r",
        "2",
        "--pin_model",
        "off",
        "--save_strategy",
        "steps",
    ]
    flags = clm(tmp_path, *lora, "--save_steps", "2", "--max_steps", "4", "--learning_rate", "1e-2")
    whole = run_clm.main(flags)
    resumed = run_clm.main(
        [*flags, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-2")]
    )
    assert resumed["eval_loss"] == whole["eval_loss"]
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["type", "file"])
def test_run_clm_makes_a_config_whose_parts_go_together(source: str, tmp_path: Path) -> None:
    """Kinds of blocks are listed for as many as there are, in 16 bits, and what is saved loads
    again."""
    Qwen3Config(num_hidden_layers=3, max_position_embeddings=64).save_pretrained(
        tmp_path / "config"
    )
    where = (
        ["--model_type", "qwen3"]
        if source == "type"
        else ["--config_name", str(tmp_path / "config")]
    )
    overrides = (
        "hidden_size=32,intermediate_size=48,num_hidden_layers=2,num_attention_heads=4,"
        "num_key_value_heads=2"
    )
    overrides += ",head_dim=8,vocab_size=64,tie_word_embeddings=true"
    run_clm.main(
        clm(
            tmp_path,
            *where,
            "--config_overrides",
            overrides,
            "--dtype",
            "bfloat16",
            "--max_steps",
            "2",
        )
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype is torch.bfloat16
    assert loaded.config.tie_word_embeddings
    assert len(loaded.config.layer_types) == loaded.config.num_hidden_layers == 2
    assert loaded.config.max_position_embeddings == (64 if source == "file" else 32768)


def test_run_clm_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--model_type; None is none"):
        run_clm.main(clm(tmp_path))


@pytest.mark.slow
def test_run_image_classification_trains_as_with_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From scratch, on a folder of images, with `compute_metrics`."""
    flags = [
        *("--train_dir", str(save_images(tmp_path / "images")), "--train_val_split", "0.34"),
        *(
            "--do_train",
            "--do_eval",
            "--per_device_train_batch_size",
            "4",
            "--num_train_epochs",
            "6",
        ),
        *("--learning_rate", "1e-2", "--output_dir", str(tmp_path / "out"), "--devices", "2"),
        *VIT,
        *QUIET,
    ]
    keys = ["train_loss", "eval_loss", "eval_accuracy"]
    ours, plain = both_ways(run_image_classification, flags, monkeypatch, keys)
    assert sorted(ours) == sorted(keys)
    assert ours == pytest.approx(plain, abs=1e-4)
    assert ours["eval_accuracy"] == 1.0


@pytest.mark.slow
def test_sft_trains_as_with_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA on a tiny model from a folder, rows from a file, with packing."""
    run_clm.main(clm(tmp_path, *LLAMA, "--max_steps", "1"))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in sentences(40))
    )
    flags = [
        *(
            "--model_name_or_path",
            str(tmp_path / "out"),
            "--train_file",
            str(tmp_path / "rows.jsonl"),
        ),
        *(
            "--use_peft",
            "--lora_r",
            "2",
            "--lora_dropout",
            "0",
            "--lora_target_modules",
            "all-linear",
            "--held_out",
            "8",
            "--packing",
        ),
        *(
            "--max_length",
            "16",
            "--per_device_train_batch_size",
            "2",
            "--gradient_accumulation_steps",
            "2",
        ),
        *("--learning_rate", "1e-2", "--num_train_epochs", "1", "--bf16", "False"),
        *("--devices", "2", "--output_dir", str(tmp_path / "sft")),
        *QUIET,
    ]
    keys = ["train_loss", "eval_loss", "eval_entropy", "eval_mean_token_accuracy"]
    results = []
    for cls in (sft.RoundPipeSFTTrainer, PlainSFTTrainer):
        monkeypatch.setattr(sft, "RoundPipeSFTTrainer", cls)
        results.append({key: value for key, value in sft.main(flags).items() if key in keys})
    assert sorted(results[0]) == sorted(keys)
    assert results[0] == pytest.approx(results[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_reaches_the_held_out_loss_of_the_plain_trainers(tmp_path: Path) -> None:
    """LoRA on real weights with either trainer, on one small sample: 1e-3."""
    try:
        folder = smollm2_folder()
        wiki_summaries()
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    rows = sft.summaries().select(range(8))
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    )
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def held_out_loss(cls: Any, args: Any, train: Any, held_out: Any, **given: Any) -> float:
        torch.manual_seed(0)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora
        )
        trainer = cls(
            model,
            args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            **given,
        )
        trainer.train()
        return trainer.evaluate()["eval_loss"]

    train, held_out = rows.select(range(4)), rows.select(range(4, 8))
    more = {"bf16": False, "max_length": 48}
    ours = held_out_loss(
        sft.RoundPipeSFTTrainer, RoundPipeSFTConfig(devices=2, **settings, **more), train, held_out
    )
    plain = held_out_loss(PlainSFTTrainer, SFTConfig(**settings, **more), train, held_out)
    assert ours == pytest.approx(plain, abs=1e-3)

    texts = [row["prompt"][0]["content"] + row["completion"][0]["content"] for row in rows]
    tokens = [
        {"input_ids": tokenizer(text, truncation=True, max_length=32)["input_ids"]}
        for text in texts
    ]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    ours = held_out_loss(
        RoundPipeTrainer,
        RoundPipeTrainingArguments(devices=2, **settings),
        tokens[:4],
        tokens[4:],
        data_collator=collator,
    )
    plain = held_out_loss(
        Trainer, TrainingArguments(**settings), tokens[:4], tokens[4:], data_collator=collator
    )
    assert ours == pytest.approx(plain, abs=1e-3)


@pytest.mark.slow
def test_dpo_trains_as_with_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA on SmolLM2 from the package index, and its pairs."""
    flags = [
        *("--smollm2", "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"),
        *("--max_steps", "2", "--max_length", "48", "--per_device_train_batch_size", "2"),
        *("--held_out", "4", "--learning_rate", "1e-3", "--bf16", "False", "--dtype", "float32"),
        *("--devices", "2", "--output_dir", str(tmp_path / "dpo")),
        *QUIET,
    ]
    keys = ["train_loss", "eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"]
    results = []
    for cls in (dpo.RoundPipeDPOTrainer, PlainDPOTrainer):
        monkeypatch.setattr(dpo, "RoundPipeDPOTrainer", cls)
        results.append({key: value for key, value in dpo.main(flags).items() if key in keys})
    assert sorted(results[0]) == sorted(keys)
    assert results[0] == pytest.approx(results[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_trains_as_with_the_plain_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA on SmolLM2 from the package index: the same completions, and the same rewards."""
    flags = [
        *("--smollm2", "--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"),
        *("--max_steps", "1", "--num_generations", "4", "--max_completion_length", "8"),
        *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "4"),
        *("--held_out", "4", "--learning_rate", "1e-3", "--bf16", "False", "--dtype", "float32"),
        *("--devices", "2", "--output_dir", str(tmp_path / "grpo")),
        *QUIET,
    ]
    keys = ["train_loss", "eval_loss", "eval_reward", "eval_completions/mean_length"]
    results = []
    for cls in (grpo.RoundPipeGRPOTrainer, PlainGRPOTrainer):
        monkeypatch.setattr(grpo, "RoundPipeGRPOTrainer", cls)
        results.append({key: value for key, value in grpo.main(flags).items() if key in keys})
    assert sorted(results[0]) == sorted(keys)
    assert results[0] == pytest.approx(results[1], abs=1e-4)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("3 + 4 = 7.", 1.0), ("7 is 8", 0.0), ("seven", 0.0), ([{"content": "It is 7.0"}], 1.0)],
)
def test_the_reward_of_the_grpo_example(completion: Any, reward: float) -> None:
    """It reads the last number, in text and in conversations."""
    assert grpo.ends_with_the_answer([completion], answer=[7]) == [reward]


def documented_commands() -> list[Any]:
    """Those commands in the examples' first lines that need no file of the user's."""
    found = []
    for script in sorted(EXAMPLES.glob("*.py")):
        text = ast.get_docstring(ast.parse(script.read_text())) or ""
        for command in re.findall(r"^ *python examples/((?:.*\\\n)*.*)", text, flags=re.MULTILINE):
            words = shlex.split(command.replace("\\\n", " "), comments=True)
            if "--smollm2" in words or "--mnist" in words:
                found.append(pytest.param(words, id=script.stem))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", documented_commands())
def test_documented_commands_run(words: list[str], tmp_path: Path) -> None:
    """With a GPU and without one, where bf16 was refused; cut short by flags that come after."""
    try:
        smollm2_folder()
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    short = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--report_to", "none"]
    held_out = ["--max_eval_samples", "8"] if "--mnist" in words else ["--held_out", "8"]
    subprocess.run(
        [sys.executable, str(EXAMPLES / words[0]), *words[1:], *short, *held_out],
        cwd=tmp_path,
        check=True,
    )
