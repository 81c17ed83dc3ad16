"""Tiny random mixtures of experts, and models with linear attention, of any sizes.

Dropout is off, so that a model's own forward is the oracle.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

# As many tokens as the tokenizer of the tests has.
SIZES_OF_SFT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPED = {
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def _without(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    return {key: size for key, size in sizes.items() if key != name}


def _as_many_keys_as_queries(sizes: dict[str, Any]) -> dict[str, Any]:
    return {**sizes, "num_key_value_heads": sizes["num_attention_heads"]}


CONFIGS: dict[str, Callable[[dict[str, Any]], PreTrainedConfig]] = {
    "deepseek-v3": lambda sizes: DeepseekV3Config(
        **_as_many_keys_as_queries(sizes), **_GROUPED, **_LATENT
    ),
    "gemma3": lambda sizes: Gemma3TextConfig(**sizes, head_dim=8, sliding_window=5, **_WINDOWS),
    "glm4-moe": lambda sizes: Glm4MoeConfig(**sizes, **_GROUPED, head_dim=8),
    "gpt-oss": lambda sizes: GptOssConfig(
        **sizes, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3-moe": lambda sizes: Qwen3MoeConfig(**sizes, **_EXPERTS, head_dim=8, mlp_only_layers=[1]),
    "qwen3-next": lambda sizes: Qwen3NextConfig(
        **sizes, **_EXPERTS, **_LINEAR, shared_expert_intermediate_size=16
    ),
    "qwen3.5": lambda sizes: Qwen3_5TextConfig(**sizes, **_LINEAR),
    "qwen3.5-moe": lambda sizes: Qwen3_5MoeTextConfig(
        **_without("intermediate_size", sizes),
        **_EXPERTS,
        **_LINEAR,
        shared_expert_intermediate_size=16,
    ),
}
"""By name: of ``sizes``, those that all of them have; three layers."""

# Matrices that adapters go to, beside the stacks of experts.
TARGETS = {
    "deepseek-v3": ["q_a_proj", "kv_b_proj"],
    "qwen3-next": ["q_proj", "in_proj_qkvz"],
    "qwen3.5": ["q_proj", "in_proj_qkv"],
    "qwen3.5-moe": ["q_proj", "in_proj_qkv"],
}
WITHOUT_EXPERTS = ("gemma3", "qwen3.5")


def adapters_for(name: str) -> dict[str, Any]:
    """Settings of a `LoraConfig` whose gradients are none of them zero."""
    stacks = {} if name in WITHOUT_EXPERTS else {"target_parameters": STACKS}
    targets = TARGETS.get(name, ["q_proj", "v_proj"])
    return {"r": 2, "lora_alpha": 4, "target_modules": targets, "init_lora_weights": False} | stacks
