"""Adapters over quantized weights train through every trainer as over the dense weights that these
stand for, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.quantized import INT8, QuantizedWeight
from tests.hf.trl import test_preferences, test_rollouts
from tests.hf.trl.test_rollouts import LORA
from tests.support.example_data import save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


def make_model(*, is_quantized: bool) -> Any:
    model = test_preferences.make_model()
    for module in model.modules():
        if type(module) is nn.Linear and module is not model.lm_head:
            weight = QuantizedWeight.quantize(module.weight.detach(), INT8())
            value = weight if is_quantized else weight.dequantize()
            module.weight = nn.Parameter(value, requires_grad=False)
    return model


@pytest.mark.parametrize(
    "kind",
    ["grpo", *(pytest.param(k, marks=pytest.mark.slow) for k in ("rloo", "dpo", "kto", "reward"))],
)
def test_numbers_are_those_of_dense_weights(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_one = test_rollouts.make_one if kind in ("grpo", "rloo") else test_preferences.make_one
    found = []
    for is_quantized in (True, False):
        model = make_model(is_quantized=is_quantized)
        trainer = make_one(kind, True, folder, model, peft_config=LORA)
        assert any(isinstance(p, QuantizedWeight) for p in model.parameters()) == is_quantized
        trainer.train()
        losses = [
            (entry["loss"], entry["grad_norm"])
            for entry in trainer.state.log_history
            if "loss" in entry
        ]
        trained = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
        found.append((losses, trained))
        trainer.model_wrapped.close()
    (losses, trained), (expected, dense) = found
    assert losses == expected
    assert all(norm > 0 for _, norm in losses)
    assert all(map(torch.equal, trained, dense))
