"""An adapter is merged into its base's files to the bits that PEFT makes of both in memory."""

import json
from collections.abc import Callable
from itertools import product
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
    TrainerCallback,
)

from roundpipe.errors import ConfigError
from roundpipe.quantized import QuantizedWeight
from roundpipe_hf import RoundPipeTrainer, load_pretrained, merge_and_save
from tests.support.trainers import make_trainer, token_rows

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
        Qwen3MoeConfig(**EXPERTS, head_dim=16, num_experts=4, moe_intermediate_size=128)
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


def test_an_adapter_saved_in_half_precision(tmp_path: Path) -> None:
    path = base("llama", tmp_path)
    adapter = adapter_of(path, tmp_path / "adapter", target_modules="all-linear")
    weights = load_file(adapter / "adapter_model.safetensors")
    halves = {key: weight.to(torch.bfloat16) for key, weight in weights.items()}
    save_file(halves, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    merge_and_save(adapter, path, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(path, adapter))


def test_files_that_leave_out_the_models_prefix(tmp_path: Path) -> None:
    """As those of GPT-2 on the Hub do, which also have buffers that no parameter is made of."""
    path = base("gpt2", tmp_path)
    weights = load_file(path / "model.safetensors")
    bare = {key.removeprefix("transformer."): weight for key, weight in weights.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    adapter = adapter_of(path, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    merge_and_save(adapter, path, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(path, adapter))


def test_an_adapter_that_was_trained_when_experts_were_modules(tmp_path: Path) -> None:
    """PEFT makes one of a stack of them."""
    path = base("mixtral", tmp_path)
    shapes = {"w1": (128, 64), "w2": (64, 128), "w3": (128, 64)}
    weights: dict[str, torch.Tensor] = {}
    for layer, expert, (name, (rows, columns)) in product(range(2), range(4), shapes.items()):
        key = f"layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
        weights[f"base_model.model.model.{key}.lora_A.weight"] = torch.rand(4, columns)
        weights[f"base_model.model.model.{key}.lora_B.weight"] = torch.rand(rows, 4)
    config = LoraConfig(r=4, target_modules=list(shapes), task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path / "adapter")
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    merge_and_save(tmp_path / "adapter", path, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(path, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("name", "quantization", "settings"),
    [
        ("llama", "nf4", {"target_modules": "all-linear"}),
        ("llama", "fp8", {"target_modules": "all-linear", "use_dora": True}),
        ("llama", "int8", ATTENTION),
        ("gpt-oss", "mxfp4", {**ATTENTION, **OF_EXPERTS}),
        ("qwen3-moe", "fp8", {**ATTENTION, **OF_EXPERTS}),
        ("qwen3-moe", "nf4", OF_EXPERTS),
    ],
)
def test_a_quantized_base_is_written_dense(
    tmp_path: Path, name: str, quantization: str, settings: dict[str, Any]
) -> None:
    path = base(name, tmp_path, max_shard_size="150KB")
    adapter = adapter_of(path, tmp_path / "adapter", **settings)
    quantized = load_pretrained(
        path, quantization=quantization, quantized_dir=tmp_path / quantization
    )
    merge_and_save(adapter, tmp_path / quantization, tmp_path / "out")
    assert layout(tmp_path / "out") == layout(path)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")

    dense = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    weights = dict(quantized.named_parameters())
    assert any(isinstance(one, QuantizedWeight) for one in weights.values())
    for key, parameter in dense.named_parameters():
        weight = weights[key].detach()
        parameter.data = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    assert_same(merged, PeftModel.from_pretrained(dense, adapter).merge_and_unload())


def refused(match: str, adapter: Path, path: Path, out: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        merge_and_save(adapter, path, out)
    assert not out.exists()


def changed(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"peft_type": "LOHA"}, "a LOHA adapter is not merged"),
        ({"init_lora_weights": "pissa"}, "'pissa' has changed the base's weights"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication makes layers"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens=\[1\] is not merged"),
        ({"target_modules": ["nothing"]}, "does not fit LlamaForCausalLM"),
        ({"r": 8}, "does not fit LlamaForCausalLM"),
        ({"target_modules": ["q_proj"]}, "2 others are only in one|3 others are only in one"),
        ({"modules_to_save": ["lm_head"]}, "does not fit LlamaForCausalLM"),
        ({"lora_bias": True}, "does not fit LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_merged_exactly(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    path = base("llama", tmp_path)
    adapter = adapter_of(path, tmp_path / "adapter", **ATTENTION)
    changed(adapter, **settings)
    refused(match, adapter, path, tmp_path / "out")


def test_whole_numbers_are_not_merged_into(tmp_path: Path) -> None:
    """Half of the files had been written when torch could not cast the sum."""
    path = base("llama", tmp_path)
    adapter = adapter_of(path, tmp_path / "adapter", **ATTENTION)
    tensors = load_file(path / "model.safetensors")
    key = next(key for key in tensors if "q_proj" in key)
    tensors[key] = tensors[key].to(torch.int64)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    refused(f"{key} is torch.int64 in the base's files", adapter, path, tmp_path / "out")


def test_a_bias_without_a_place(tmp_path: Path) -> None:
    path = base("llama", tmp_path)
    adapter = adapter_of(path, tmp_path / "adapter", **ATTENTION, lora_bias=True)
    refused(r"lora_bias of model.layers.0.self_attn.q_proj", adapter, path, tmp_path / "out")


def test_another_models_adapter(tmp_path: Path) -> None:
    path = base("llama", tmp_path)
    adapter = adapter_of(path, tmp_path / "adapter", **ATTENTION)
    other = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 72, "hidden_size": 32}))
    other.save_pretrained(tmp_path / "other")
    refused("name the base that it was", adapter, tmp_path / "other", tmp_path / "out")


def test_one_file_of_another_name(tmp_path: Path) -> None:
    """It has an index, and so has what is made of it: nothing found the file without one."""
    path = base("llama", tmp_path)
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    keys = layout(path)["model-00001-of-00001.safetensors"]
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = adapter_of(path, tmp_path / "adapter", **ATTENTION)
    merge_and_save(adapter, path, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(path, adapter))
    load_pretrained(path, quantization="int8", quantized_dir=tmp_path / "int8")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = base("llama", tmp_path)
    adapter = adapter_of(path, tmp_path / "adapter", **ATTENTION)
    refused("has no adapter_config.json", path, path, tmp_path / "out")
    refused("is no adapter's folder", tmp_path / "mistyped", path, tmp_path / "out")
    refused("has no safetensors files", adapter, adapter.parent, tmp_path / "out")


def test_a_merge_while_training_goes_on_changes_nothing(tmp_path: Path) -> None:
    """In the midst of asynchronous steps, of the adapter as it was saved then, over files that the
    model is mapped from."""
    path = base("llama", tmp_path)
    rows = token_rows(8)

    class Merges(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                kwargs["model"].save_pretrained(tmp_path / "adapter")
                merge_and_save(tmp_path / "adapter", path, tmp_path / "out")

    losses = []
    for callbacks in ([], [Merges()]):
        torch.manual_seed(1)
        model = get_peft_model(load_pretrained(path), LoraConfig(**ATTENTION))
        trainer = make_trainer(
            RoundPipeTrainer,
            model,
            rows,
            max_steps=4,
            async_optimizer=True,
            pin_model="off",
            callbacks=callbacks,
        )
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == losses[1]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(merged, peft_merges(path, tmp_path / "adapter"))
