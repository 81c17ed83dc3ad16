"""PEFT cannot merge into quantized weights, and says so before it has changed anything."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained
from tests.hf.quantization.test_reading import llama


def model_of(folder: Path, target: list[str]) -> Any:
    llama().save_pretrained(folder / "dense")
    model = load_pretrained(folder / "dense", quantization="int8", quantized_dir=folder / "int8")
    settings: dict[str, Any] = {"target_modules": target, "modules_to_save": ["embed_tokens"]}
    return get_peft_model(model, LoraConfig(init_lora_weights=False, **settings))


def give_to_a_trainer(model: Any, folder: Path) -> None:
    args = RoundPipeTrainingArguments(str(folder), use_cpu=True, report_to=[])
    RoundPipeTrainer(model, args, train_dataset=[])


def test_a_refused_merge_changes_nothing(tmp_path: Path) -> None:
    """The embeddings, which come first, had been taken out of the adapter."""
    model = model_of(tmp_path, ["q_proj"])
    give_to_a_trainer(model, tmp_path)
    names = [name for name, _ in model.named_parameters()]
    for one in (model, copy.deepcopy(model)):
        for merge in (one.merge_and_unload, one.merge_adapter):
            with pytest.raises(ConfigError, match=r"q_proj are quantized.*merge_and_save"):
                merge()
        assert [name for name, _ in one.named_parameters()] == names


def test_an_adapter_of_dense_weights_is_merged(tmp_path: Path) -> None:
    model = model_of(tmp_path, ["lm_head"])
    give_to_a_trainer(model, tmp_path)
    rows = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        expected = model(input_ids=rows).logits
        found = model.merge_and_unload()(input_ids=rows).logits
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-6)
