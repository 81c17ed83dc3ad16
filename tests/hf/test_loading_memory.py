"""LoRA on a memory-mapped base: memory that is no file's grows by less than a tenth of the base,
from before loading to after training; losses are bitwise those of the same base in memory.

Anonymous pages count, and shared ones, which buffers are in that could be page-locked. What the
virtual device's slots take does not: a device has its own memory. Measured in a process of its own,
which has trained a tiny model before, so that what libraries allocate once is there; over a base of
a gigabyte, because a device's ring takes 48 MB whatever it is for, and each block some 200 kB of
Python objects. The process gives every freed tensor back at once: what the C library keeps of them
differs by 90 MB from run to run, and is nobody's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback

from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained_mmap
from tests.support import ROOT

DEVICE_GB = 90 / 1024
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_grows_by_less_than_a_tenth_of_the_base(tmp_path: Path) -> None:
    save(tmp_path / "tiny", num_hidden_layers=2)
    base_bytes = save(tmp_path / "large", num_hidden_layers=64)
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom {__name__} import measure; measure()"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | GIVES_BACK,
    )
    assert process.returncode == 0, process.stderr
    measured = json.loads(process.stdout.splitlines()[-1])
    assert base_bytes > 1e9
    assert 0 < measured["growth"] < base_bytes / 10
    assert measured["losses"] == measured["losses in memory"]
    assert measured["growth in memory"] > base_bytes, "the measurement sees nothing"


def save(folder: Path, **settings: int) -> int:
    """A checkpoint of blocks of 17 MB; its size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=4,
        num_key_value_heads=4,
        **settings,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


def measure() -> None:
    """Runs in a process of its own; prints what it found."""
    torch.set_num_threads(1)
    trained(load_pretrained_mmap("tiny"), "off")
    before = own_bytes()
    mapped = trained(load_pretrained_mmap("large"), "off")
    in_memory = trained(AutoModelForCausalLM.from_pretrained("large", disable_mmap=True), "alloc")
    found = {
        "losses": mapped.losses,
        "growth": mapped.most_bytes - mapped.slot_bytes - before,
        "losses in memory": in_memory.losses,
        "growth in memory": in_memory.most_bytes - before,
    }
    print(json.dumps(found))


class Watch(TrainerCallback):
    """Losses, and the most memory at any moment a block ran."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.most_bytes = own_bytes()
        self.slot_bytes = 0

    def look(self, *_: Any) -> None:
        self.most_bytes = max(self.most_bytes, own_bytes())

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def trained(base: Any, pin_model: Any) -> Watch:
    torch.manual_seed(1)
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    watch = Watch()
    for block in base.model.layers:
        block.register_forward_hook(watch.look)
    rows = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    args = RoundPipeTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=1,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        pin_model=pin_model,
        max_gpu_memory=DEVICE_GB,
    )
    trainer = RoundPipeTrainer(
        model,
        args,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[watch],
    )
    trainer.train()
    watch.look()
    watch.slot_bytes = sum(trainer.model_wrapped.statistics()["slot_bytes"].values())
    trainer.model_wrapped.close()
    return watch


def own_bytes() -> int:
    """Pages of this process that are no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[key].split()[0]) for key in ("RssAnon", "RssShmem"))
