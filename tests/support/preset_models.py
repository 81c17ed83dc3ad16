"""Tiny random models of every architecture that has a preset, the inputs they are tried with, and
their gradients.

Dropout is off, so that a model's own forward is the oracle. Knows nothing of the engine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY, ROWS, TOKENS = 61, 4, 12

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "truncate": False,
}


def tiny_gpt2(**settings: Any) -> GPT2Config:
    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 48,
    }
    return GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, **{**NO_DROPOUT, **settings})


def tiny_qwen3_moe(**settings: Any) -> Qwen3MoeConfig:
    """Block 1 is dense."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    }
    return Qwen3MoeConfig(**TINY, head_dim=8, **experts, **settings)


def tiny_gpt_oss(**settings: Any) -> GptOssConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(
        **TINY, head_dim=8, sliding_window=5, rope_parameters=YARN_ROPE, **experts, **settings
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama-tied-rope3": lambda: LlamaConfig(
        **TINY, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "mistral-full": lambda: MistralConfig(**TINY, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**TINY, sliding_window=5),
    "qwen2-window": lambda: Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=8),
    "qwen3-window": lambda: Qwen3Config(
        **TINY, head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3-moe": tiny_qwen3_moe,
    "qwen3-moe-window": lambda: tiny_qwen3_moe(use_sliding_window=True, sliding_window=5),
    "mixtral": lambda: MixtralConfig(**TINY, num_local_experts=4),
    "mixtral-window": lambda: MixtralConfig(**TINY, num_local_experts=4, sliding_window=5),
    "gpt-oss": tiny_gpt_oss,
    "gpt2": tiny_gpt2,
}
ONLY_EAGER = {"gpt-oss"}
# One of each architecture.
LANGUAGE_MODELS = [
    "llama",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "qwen3-moe",
    "gpt-oss",
    "gpt2",
]


def make_model(
    name: str = "llama", attention: str | None = None, config: PreTrainedConfig | None = None
) -> Any:
    """A language model in training mode, seeded. ``attention``: None for what the class prefers,
    because releases of transformers have taken SDPA from some (Gemma 2)."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config or CONFIGS[name](), attn_implementation=attention
    ).train()


def make_vit(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    config = ViTConfig(
        **sizes, image_size=8, patch_size=4, num_channels=3, **{"num_labels": 5, **settings}
    )
    return ViTForImageClassification(config).train()


def images(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator),
        "labels": torch.randint(5, (rows,), generator=generator),
    }


def tokens(rows: int = ROWS, length: int = TOKENS) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> dict[str, Tensor]:
    """Rows of 12, 9, 6 and 3 tokens."""
    ids, mask = tokens(), torch.ones(ROWS, TOKENS, dtype=torch.long)
    for row in range(ROWS):
        pad = slice(0, 3 * row) if side == "left" else slice(TOKENS - 3 * row, TOKENS)
        mask[row, pad] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def packed(*documents: int) -> Tensor:
    """(tokens,) position ids restarting with each document."""
    return torch.cat([torch.arange(length) for length in documents])


def shift_labels() -> Tensor:
    return torch.cat([tokens()[:, 1:], torch.full((ROWS, 1), -100)], dim=1)


def embeds() -> Tensor:
    return torch.randn(
        ROWS, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(2)
    )


ROW_PACKING = torch.stack([packed(5, 7), packed(12), packed(3, 4, 5), packed(1, 11)])

INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "no labels": lambda: {"input_ids": tokens()},
    "labels": lambda: {"input_ids": tokens(), "labels": tokens()},
    "padded left": lambda: padded("left"),
    "padded right": lambda: padded("right"),
    "mask of ones": lambda: {
        "input_ids": tokens(), "attention_mask": torch.ones(ROWS, TOKENS), "labels": tokens()
    },
    "packed (1, S), one row": lambda: {
        "input_ids": tokens(1), "position_ids": packed(5, 7)[None], "labels": tokens(1)
    },
    "packed (1, S), all rows": lambda: {
        "input_ids": tokens(), "position_ids": packed(5, 7)[None], "labels": tokens()
    },
    "packed (B, S)": lambda: {
        "input_ids": tokens(), "position_ids": ROW_PACKING, "labels": tokens()
    },
    "inputs_embeds": lambda: {"inputs_embeds": embeds(), "labels": tokens()},
    "shift_labels": lambda: {
        "input_ids": tokens(), "labels": tokens(), "shift_labels": shift_labels()
    },
    "keep 3 logits": lambda: {"input_ids": tokens(), "logits_to_keep": 3},
    "keep chosen logits": lambda: {
        "input_ids": tokens(), "logits_to_keep": torch.tensor([1, 4, 5, 9])
    },
    "num_items_in_batch": lambda: {
        "input_ids": tokens(), "labels": tokens(), "num_items_in_batch": torch.tensor(100)
    },
    "num_items_in_batch, int": lambda: {
        "input_ids": tokens(), "labels": tokens(), "num_items_in_batch": 100
    },
    "ignore_index": lambda: {"input_ids": tokens(), "labels": tokens() % 5, "ignore_index": 3},
    "not causal": lambda: {"input_ids": tokens(), "labels": tokens(), "is_causal": False},
}  # fmt: skip


def inputs_of(model: nn.Module, inputs: str) -> dict[str, Any]:
    """For ViT, which has neither padding nor packing, always the same images."""
    return images() if isinstance(model, ViTForImageClassification) else INPUTS[inputs]()


def model_of(preset: str) -> Any:
    return make_vit() if preset == "vit" else make_model(preset)


def backward(output: Any) -> None:
    (output.logits.float().square().mean() if output.loss is None else output.loss).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Takes them: the next backward starts from zero."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def own_forward(model: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """What the model's own forward and autograd give; the model is as before."""
    no_cache = {} if "pixel_values" in kwargs else {"use_cache": False}
    output = model(**kwargs, **no_cache)
    backward(output)
    return output, gradients_of(model)
