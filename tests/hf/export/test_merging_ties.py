"""Tied embeddings are merged as an adapter was trained to change them, or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from roundpipe_hf import merge_and_save
from tests.hf.export.test_merging import (
    ATTENTION,
    SIZES,
    adapter_of,
    assert_same,
    layout,
    peft_merges,
    refused,
)

TIED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embeddings": {"target_modules": ["embed_tokens"]},
    "saved head": {**ATTENTION, "modules_to_save": ["lm_head"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "tokens of the head": {**ATTENTION, "trainable_token_indices": {"lm_head": [3, 5]}},
    "other tokens of both": {
        **ATTENTION,
        "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 7]},
    },
}


@pytest.mark.parametrize("held", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("case", TIED)
def test_an_adapter_of_one_of_two_tied_weights_unties_them(
    tmp_path: Path, case: str, held: str
) -> None:
    """PEFT adds to the memory that both share, so its merged model is not the one that was trained.
    That one has two weights. Files may hold either name; a head's changes became the embedding's
    where they held that of the head."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors[held] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    adapter = adapter_of(tmp_path / "base", tmp_path / "adapter", **TIED[case])
    merge_and_save(adapter, tmp_path / "base", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")

    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    assert_same(merged, expected)
    assert not torch.equal(merged.lm_head.weight, merged.model.embed_tokens.weight)


@pytest.mark.parametrize(
    "settings",
    [
        ATTENTION,
        {**ATTENTION, "trainable_token_indices": [3, 5]},
        {**ATTENTION, "trainable_token_indices": {"embed_tokens": [3, 5], "lm_head": [3, 5]}},
        {**ATTENTION, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {**ATTENTION, "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
        {**ATTENTION, "ensure_weight_tying": True},
    ],
    ids=["untouched", "tokens", "the same tokens", "tied in training", "tied head", "nothing tied"],
)
def test_ties_stay_where_both_got_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    adapter = adapter_of(tmp_path / "base", tmp_path / "adapter", **settings)
    merge_and_save(adapter, tmp_path / "base", tmp_path / "out")
    assert layout(tmp_path / "out") == layout(tmp_path / "base")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert merged.config.tie_word_embeddings
    assert_same(merged, peft_merges(tmp_path / "base", adapter))


@pytest.mark.parametrize("saved", [["wte"], ["ln_f"]])
def test_ties_part_where_peft_did_not_keep_them(tmp_path: Path, saved: list[str]) -> None:
    """PEFT does not know embeddings of that name, and trains them apart from the head although it
    is asked not to. The head's got the embeddings' values because the config asked for ties."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": saved}
    adapter = adapter_of(
        tmp_path / "base", tmp_path / "adapter", **settings, ensure_weight_tying=True
    )
    merge_and_save(adapter, tmp_path / "base", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(tmp_path / "base", adapter))
    assert merged.config.tie_word_embeddings == (saved == ["ln_f"])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
            "ensure_weight_tying of LoRA layers is not merged",
        ),
        (
            {
                "target_modules": ["embed_tokens"],
                "modules_to_save": ["norm"],
                "ensure_weight_tying": True,
            },
            "ensure_weight_tying of LoRA layers is not merged",
        ),
        (
            {"target_modules": ["lm_head"], "trainable_token_indices": [3, 5]},
            "cannot be merged: trainable_token_indices cannot be applied to .*lora.layer.Linear",
        ),
    ],
    ids=["tied layers of LoRA", "beside a saved module", "tokens under LoRA"],
)
def test_ties_that_peft_does_not_merge(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "base")
    adapter = adapter_of(tmp_path / "base", tmp_path / "adapter", **settings)
    refused(match, adapter, tmp_path / "base", tmp_path / "out")
