"""Saving into the folder the weights were mapped from gave an error, zeros or garbage.

The files are mapped while they are replaced. They must be written beside the old ones and renamed:
then the mapping still shows the old file, the new one holds what is in memory, and a crash half way
leaves the old one whole.

Source: huggingface/transformers#37713, bghira/SimpleTuner#2714, safetensors/safetensors#762.
"""

import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained_mmap
from tests.support import ROOT
from tests.support.models import LLAMA_LENGTH, LLAMA_VOCABULARY, make_llama
from tests.support.reference import Tensors, weights_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_llama(tied=False).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def trainer_for(model: Any, folder: Path) -> RoundPipeTrainer:
    rows = torch.randint(
        0, LLAMA_VOCABULARY, (4, LLAMA_LENGTH), generator=torch.Generator().manual_seed(0)
    )
    args = RoundPipeTrainingArguments(
        output_dir=str(folder),
        max_steps=1,
        learning_rate=0.1,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        pin_model="off",
    )
    return RoundPipeTrainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )


def loaded_plainly(folder: Path) -> Tensors:
    return weights_of(LlamaForCausalLM.from_pretrained(folder))


def assert_equal(weights: Tensors, others: Tensors) -> None:
    assert list(weights) == list(others)
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def test_a_trained_model_is_saved_over_its_own_files_again_and_again(folder: Path) -> None:
    """The file equals what is in memory, memory is not changed by the save, and the next load
    equals both."""
    before = loaded_plainly(folder)
    for _ in range(3):
        trainer = trainer_for(load_pretrained_mmap(folder), folder)
        trainer.train()
        weights = weights_of(trainer.model)
        assert any(not torch.equal(value, before[name]) for name, value in weights.items()), (
            "nothing was trained"
        )
        trainer.save_model()
        trainer.save_model()
        assert_equal(weights_of(trainer.model), weights)
        assert_equal(loaded_plainly(folder), weights)
        trainer.model_wrapped.close()
        before = weights


def test_merged_adapters_are_saved_over_their_base(folder: Path) -> None:
    before = loaded_plainly(folder)
    torch.manual_seed(0)
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    trainer = trainer_for(get_peft_model(load_pretrained_mmap(folder), adapter), folder)
    trainer.train()
    trainer.model_wrapped.close()
    merged: nn.Module = trainer.model.merge_and_unload()
    weights = weights_of(merged)
    merged.save_pretrained(folder)  # type: ignore[operator]
    assert_equal(weights_of(merged), weights)
    assert_equal(loaded_plainly(folder), weights)
    changed = [name for name, value in weights.items() if not torch.equal(value, before[name])]
    assert changed
    assert all("q_proj" in name for name in changed)


def test_an_adapter_is_saved_beside_its_mapped_base(folder: Path) -> None:
    """The trainer's output folder is the base's: only adapter files appear, the base's file stays
    the same one."""
    content = (folder / "model.safetensors").read_bytes()
    trainer = trainer_for(
        get_peft_model(load_pretrained_mmap(folder), LoraConfig(target_modules=["q_proj"])), folder
    )
    trainer.train()
    trainer.save_model()
    assert (folder / "adapter_model.safetensors").is_file()
    assert (folder / "model.safetensors").read_bytes() == content
    trainer.model_wrapped.close()


@pytest.mark.slow
def test_a_crash_in_the_middle_of_a_save_leaves_the_old_file_whole(folder: Path) -> None:
    """The system kills the process at the first byte beyond a limit on file sizes, which the
    weights exceed."""
    before = loaded_plainly(folder)
    limit = (folder / "model.safetensors").stat().st_size // 2
    assert (folder / "config.json").stat().st_size < limit
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from {__name__} import save_and_be_killed
save_and_be_killed(Path({str(folder)!r}), {limit})
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert process.returncode == -signal.SIGXFSZ, process.stderr
    assert_equal(loaded_plainly(folder), before)


def save_and_be_killed(folder: Path, limit: int) -> None:
    """Runs in a process of its own."""
    trainer = trainer_for(load_pretrained_mmap(folder), folder)
    trainer.train()
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    trainer.save_model()
