"""Adapters of models that see are merged into their base's files as PEFT merges them in memory,
and what these files hold is loaded as the model has it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from roundpipe.quantized import FORMATS, QuantizedWeight
from roundpipe_hf import load_pretrained, merge_and_save
from tests.hf.export.test_merging import assert_same, layout
from tests.hf.test_vision import make
from tests.support.vision_models import make_seeing, seen_batch


def base_of(name: str, folder: Path, *, turns: bool = False) -> Path:
    """``turns``: with the experts of the files on the Hub, whose matrices are the other way round
    than the model's."""
    make_seeing(name).save_pretrained(folder)
    if turns:
        weights = load_file(folder / "model.safetensors")
        turned = {
            key: weight.mT.contiguous() if "experts" in key else weight
            for key, weight in weights.items()
        }
        assert any(turned[key].shape != weight.shape for key, weight in weights.items())
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("qwen3-vl-moe", False),
        ("qwen3-vl-moe", True),
        *((name, False) for name in ("qwen3.5-moe", "qwen3-vl", "llava", "gemma3")),
    ],
)
def test_numbers_are_those_of_peft(tmp_path: Path, name: str, turns: bool) -> None:
    """Of the tower, the language model and its experts. Those of Qwen3-VL-MoE ended in an error
    about a parameter that was not there."""
    path, adapter = base_of(name, tmp_path / "base", turns=turns), tmp_path / "adapter"
    adapted: Any = make(name, lora=True)
    kind = type(adapted.get_base_model())
    adapted.save_pretrained(adapter)
    merge_and_save(adapter, path, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(path)
    base = kind.from_pretrained(path)
    expected = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    assert_same(kind.from_pretrained(tmp_path / "out"), expected)
    batch = seen_batch(expected)
    loss = kind.from_pretrained(tmp_path / "out").train()(**batch).loss
    torch.testing.assert_close(loss, adapted(**batch).loss)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_experts_that_lie_the_other_way_round_are_loaded(
    tmp_path: Path, quantization: str | None, turns: bool
) -> None:
    """They were quantized as they lay, and refused when the files had been written."""
    path = base_of("qwen3-vl-moe", tmp_path / "base", turns=turns)
    model = load_pretrained(
        path, quantization=quantization, quantized_dir=tmp_path / "out", dtype=torch.float32
    )
    expected = make_seeing("qwen3-vl-moe")
    num_quantized = 0
    for name, weight in model.named_parameters():
        wanted = expected.get_parameter(name).detach()
        if isinstance(weight, QuantizedWeight):
            form = FORMATS[quantization or ""]
            wanted = form.dequantize(form.quantize(wanted), wanted.shape, wanted.dtype)
            weight = weight.dequantize()
            num_quantized += "experts" in name
        assert torch.equal(weight, wanted), name
    assert num_quantized == (0 if quantization is None else 4)
