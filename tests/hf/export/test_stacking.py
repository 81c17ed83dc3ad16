"""Experts that are a tensor each are stacked once, and stay in the files from then on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.memory.mmap import FileMappings
from roundpipe_hf import RoundPipeTrainer, load_pretrained, stack_experts
from roundpipe_hf.export import stacking
from tests.hf.export.test_merging import assert_same, base
from tests.support.trainers import assert_same_logs, logged, make_trainer, run

both = pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@both
def test_weights_are_the_same_and_stay_mapped(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = base(name, tmp_path), tmp_path / "out"
    stack_experts(path, out)
    model = load_pretrained(out)
    assert not caplog.records, "it says what it has copied"
    assert_same(model, AutoModelForCausalLM.from_pretrained(path, dtype="auto"))
    mappings = FileMappings.now()
    for parameter in model.parameters():
        file = mappings.file_of(parameter)
        assert file is not None
        assert Path(file).parent == out.resolve()
    assert (out / "tokenizer_config.json").exists()
    assert not (out / "stacking.json").exists()


def test_training_over_the_files_is_that_over_memory(tmp_path: Path) -> None:
    path = base("qwen3-moe", tmp_path, torch.float32)
    stack_experts(path, tmp_path / "out")
    ids = torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def losses(folder: Path, pin_model: str) -> Any:
        torch.manual_seed(3)
        how = LoraConfig(
            r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]
        )
        model = get_peft_model(load_pretrained(folder, mmap=pin_model == "off"), how)
        return logged(run(make_trainer(RoundPipeTrainer, model, rows, pin_model=pin_model)))

    assert_same_logs(losses(tmp_path / "out", "off"), losses(path, "alloc"))


def test_it_goes_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are the same bytes as without; a second call of a finished one writes nothing."""
    monkeypatch.setattr(stacking, "_FILE_BYTES", 20_000)
    path = base("qwen3-moe", tmp_path)
    stack_experts(path, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 3

    write, left = stacking._write, [2]

    def interrupted(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            args[-1].write_bytes(b"half")
            raise KeyboardInterrupt
        write(*args)

    monkeypatch.setattr(stacking, "_write", interrupted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        stack_experts(path, out)
    assert not (out / "config.json").exists()
    first = min(out.glob("*.safetensors"))
    written = first.stat().st_mtime_ns
    monkeypatch.setattr(stacking, "_write", write)
    stack_experts(path, out)
    assert contents(out) == expected
    assert first.stat().st_mtime_ns == written
    monkeypatch.setattr(stacking, "_write", interrupted)
    stack_experts(path, out)
    assert contents(out) == expected


def test_what_cannot_be_stacked_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for folder in ("dense", "moe", "packed"):
        (tmp_path / folder).mkdir()
    with pytest.raises(ConfigError, match="no tensor of a single expert"):
        stack_experts(base("llama", tmp_path / "dense"), out)
    path = base("qwen3-moe", tmp_path / "moe")
    load_pretrained(path, quantization="fp8", quantized_dir=tmp_path / "packed" / "fp8")
    with pytest.raises(ConfigError, match=r"quantized \(fp8\)"):
        stack_experts(tmp_path / "packed" / "fp8", out)
    assert not out.exists()
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match="holds something else"):
        stack_experts(path, out)
    assert contents(out) == {"model.safetensors": b"somebody's"}


def test_a_full_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = base("qwen3-moe", tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"GB are to be written and 0\.0 GB are free"):
        stack_experts(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
