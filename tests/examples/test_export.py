"""The example goes from an adapter's folder to a GGUF file that holds the merged weights."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import export
from tests.hf.export.test_gguf import saved
from tests.hf.export.test_merging import ATTENTION, adapter_of, peft_merges

pytest.importorskip("gguf")


def test_from_an_adapter_to_a_gguf_file(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    adapter = adapter_of(tmp_path / "base", tmp_path / "adapter", **ATTENTION)
    folders = {"adapter": adapter, "base": tmp_path / "base", "output_dir": tmp_path / "merged"}
    flags = [flag for name, folder in folders.items() for flag in (f"--{name}", str(folder))]
    export.main([*flags, "--gguf", str(tmp_path / "out" / "model.gguf")])
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    )
    weights = dict(read.named_parameters())
    for name, weight in peft_merges(tmp_path / "base", adapter).named_parameters():
        assert torch.equal(weights[name], weight.float()), name
