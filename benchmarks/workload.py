"""What every benchmark trains: Llama-3.2-1B shapes with random weights, one batch of random tokens, AdamW, clipping.

Knows nothing of who trains it. The same seed gives the same weights and tokens, so losses compare across systems.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Method = Literal["full", "lora"]
LEARNING_RATE = 1e-4
MAX_NORM = 1.0
LORA_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one step. ``tiny`` is for trying a script on a CPU; its figures mean nothing."""

    method: Method
    tiny: bool
    num_microbatch: int

    @property
    def rows(self) -> int:
        return 8 if self.tiny else 16

    @property
    def length(self) -> int:
        return 32 if self.tiny else 2048

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length

    @property
    def predictions_per_step(self) -> int:
        """The last token of a row predicts nothing."""
        return self.rows * (self.length - 1)

    @property
    def shapes(self) -> dict[str, Any]:
        shared: dict[str, Any] = {"tie_word_embeddings": True, "use_cache": False, "rms_norm_eps": 1e-5}
        if self.tiny:
            return shared | {
                "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
            }  # fmt: skip
        return shared | {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        }  # fmt: skip


def make_model(workload: Workload, device: torch.device) -> nn.Module:
    """bf16 weights made on ``device`` (a GPU fills 1.2 G weights in no time), adapters in bf16 too."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    with device:
        config = LlamaConfig(**workload.shapes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        if workload.method == "lora":
            model = _with_lora(model)
    return model.train()


def _with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def make_tokens(workload: Workload) -> Tensor:
    """(rows, length). Every step trains on the same batch, so that a falling loss shows that training works."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(workload.shapes["vocab_size"], (workload.rows, workload.length), generator=generator)


def describe(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """What a record says of the workload; what a bound is computed from."""
    shapes = workload.shapes
    return {
        "workload": "tiny" if workload.tiny else "Llama-3.2-1B shapes",
        "method": workload.method if workload.method == "full" else f"LoRA r={LORA_RANK} all-linear",
        "dtype": "bf16 weights, fp32 masters and moments",
        "clipping": MAX_NORM,
        "tokens_per_step": workload.tokens_per_step,
        "length": workload.length,
        "num_microbatch": workload.num_microbatch,
        "params": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "hidden": shapes["hidden_size"],
        "layers": shapes["num_hidden_layers"],
    }
