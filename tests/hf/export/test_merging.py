"""An adapter is merged into its base's files to the bits that PEFT makes of both in memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roundpipe.errors import ConfigError
from roundpipe.quantized import QuantizedWeight
from roundpipe_hf import load_pretrained, merge_and_save

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**SIZES, "num_experts_per_tok": 2}
OF_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, attention_bias=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, tie_word_embeddings=False)
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=32)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**EXPERTS, num_local_experts=4)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**EXPERTS, head_dim=16, num_local_experts=4, sliding_window=8)
    ),
}


def base(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
    torch.manual_seed(0)
    MODELS[name]().to(dtype).save_pretrained(folder / "base", **how)
    (folder / "base" / "tokenizer_config.json").write_text("{}")
    return folder / "base"


def adapter_of(path: Path, out: Path, **settings: Any) -> Path:
    """An adapter with something to merge: nothing in it is zero."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    torch.manual_seed(1)
    how = {"r": 4, "lora_alpha": 7, "init_lora_weights": False, **settings}
    adapted = get_peft_model(model, LoraConfig(**how))
    with torch.no_grad():
        for parameter in (one for one in adapted.parameters() if one.requires_grad):
            parameter.add_(torch.rand_like(parameter), alpha=0.1)
    adapted.save_pretrained(out)
    return out


def peft_merges(path: Path, adapter: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    there = dict(model.named_parameters(remove_duplicate=False))
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    assert there.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert weight.dtype == there[name].dtype, name
        assert torch.equal(weight, there[name]), name


def layout(folder: Path) -> dict[str, dict[str, Any]]:
    """What each file has, without the values."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            found[file.name] = {
                key: (one.get_dtype(), one.get_shape()) for key, one in slices.items()
            }
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": "all-linear"}),
    "rsLoRA": ("llama", {**ATTENTION, "use_rslora": True}),
    "DoRA": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "patterns": (
        "llama",
        {**ATTENTION, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v": 3}},
    ),
    "some layers": ("llama", {**ATTENTION, "layers_to_transform": [1]}),
    "biases": ("qwen3", {**ATTENTION, "bias": "all"}),
    "bias of LoRA": ("qwen3", {**ATTENTION, "lora_bias": True}),
    "modules to save": ("llama", {**ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "DoRA of embeddings": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "tokens": ("llama", {**ATTENTION, "trainable_token_indices": [3, 5]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
    "DoRA transposed": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "an expert each": ("qwen3-moe", {**ATTENTION, **OF_EXPERTS}),
    "renamed experts": ("mixtral", OF_EXPERTS),
    "stacked experts": ("gpt-oss", {**ATTENTION, **OF_EXPERTS}),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_peft(tmp_path: Path, case: str) -> None:
    name, settings = CASES[case]
    path = base(name, tmp_path, max_shard_size="150KB")
    adapter = adapter_of(path, tmp_path / "adapter", **settings)
    merge_and_save(adapter, path, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = peft_merges(path, adapter)
    assert_same(merged, expected)
    assert layout(tmp_path / "out") == layout(path)
    assert len(layout(path)) > 1
    names = {file.name for file in path.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    plain = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert any(
        not torch.equal(one, other)
        for one, other in zip(plain.parameters(), merged.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    path = base("llama", tmp_path, dtype)
    adapter = adapter_of(path, tmp_path / "adapter", target_modules="all-linear", use_dora=True)
    merge_and_save(adapter, path, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(path, adapter))
