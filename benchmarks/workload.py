"""What every benchmark trains: a named model's shapes with random weights, one batch of random
tokens, AdamW, clipping.

Knows nothing of who trains it. The same seed gives the same weights and tokens, so losses compare
across systems.
"""

import argparse
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Method = Literal["full", "lora"]
LEARNING_RATE = 1e-4
MAX_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """A model's sizes. ``config`` are the arguments of the transformers config ``config_class``."""

    title: str
    config_class: str
    lora_rank: int
    config: dict[str, Any]


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS = {
    "llama-3.2-1b": Shapes(
        title="Llama-3.2-1B shapes", config_class="LlamaConfig", lora_rank=16,
        config={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "vocab_size": 128256,
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama-3-8b": Shapes(
        title="Llama-3-8B shapes", config_class="LlamaConfig", lora_rank=32,
        config={
            "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "vocab_size": 128256,
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama-3-70b": Shapes(
        title="Llama-3-70B shapes", config_class="LlamaConfig", lora_rank=16,
        config={
            "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "vocab_size": 128256,
            "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "gpt-oss-20b": Shapes(
        title="gpt-oss-20b shapes", config_class="GptOssConfig", lora_rank=16,
        config={
            "vocab_size": 201088, "hidden_size": 2880, "num_hidden_layers": 24,
            "num_local_experts": 32,
        },
    ),
    "smollm2-135m": Shapes(
        title="SmolLM2-135M shapes", config_class="LlamaConfig", lora_rank=8,
        config={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "vocab_size": 49152,
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3,
            "head_dim": 64, "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "qwen3-1.7b": Shapes(
        title="Qwen3-1.7B shapes", config_class="Qwen3Config", lora_rank=16,
        config={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "vocab_size": 151936,
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-30b-a3b": Shapes(
        title="Qwen3-30B-A3B shapes", config_class="Qwen3MoeConfig", lora_rank=16,
        config={
            "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "vocab_size": 151936,
            "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-32b": Shapes(
        title="Qwen3-32B shapes", config_class="Qwen3Config", lora_rank=32,
        config={
            "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "vocab_size": 151936,
            "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
            "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-4b": Shapes(
        title="Qwen3-4B shapes", config_class="Qwen3Config", lora_rank=16,
        config={
            "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "vocab_size": 151936,
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
}  # fmt: skip
_WORDS, _CHANCES = 128, (0.5, 0.25, 0.15, 0.1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of one step: ``rows`` sequences of ``length`` tokens. ``tiny`` is for trying a script
    on a CPU; its figures mean nothing. ``layers``: that many instead of the model's own.
    ``quantization``: the format of the blocks' frozen matrices."""

    model: str
    method: Method
    rows: int
    length: int
    num_microbatch: int
    tiny: bool
    layers: int | None = None
    quantization: str | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.length

    @property
    def predictions_per_step(self) -> int:
        """The last token of a row predicts nothing."""
        return self.rows * (self.length - 1)

    @property
    def shapes(self) -> Shapes:
        return MODELS[self.model]

    @property
    def config(self) -> dict[str, Any]:
        layers = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return self.shapes.config | {"use_cache": False} | (TINY if self.tiny else {}) | layers

    @property
    def title(self) -> str:
        """As a table names it."""
        if self.tiny:
            return "tiny"
        return (
            self.shapes.title
            if self.layers is None
            else f"{self.shapes.title}, {self.layers} layers"
        )


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-1.7b")
    parser.add_argument("--methods", nargs="+", choices=["full", "lora"], default=["full"])
    parser.add_argument("--rows", type=int, default=16, help="sequences per step (default 16)")
    parser.add_argument(
        "--length", type=int, default=2048, help="tokens per sequence (default 2048)"
    )
    parser.add_argument("--num-microbatch", type=int, default=4)
    parser.add_argument("--layers", type=int, help="so many instead of the model's own")
    parser.add_argument(
        "--quantization",
        choices=["nf4", "nf4_double", "fp8", "int8", "mxfp4"],
        help="of the blocks' frozen matrices (mxfp4: of stacked experts)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a toy model of the same kind, to try the script on a CPU",
    )


def workload_of(options: argparse.Namespace) -> Workload:
    """The workload that ``add_workload_options`` asked for; one method."""
    (method,) = options.methods
    rows, length = (
        (min(options.rows, 8), min(options.length, 32))
        if options.tiny
        else (options.rows, options.length)
    )
    return Workload(
        model=options.model, method=method, rows=rows, length=length,
        num_microbatch=options.num_microbatch, tiny=options.tiny, layers=options.layers,
        quantization=options.quantization,
    )  # fmt: skip


def make_model(workload: Workload, device: torch.device) -> nn.Module:
    """bf16 weights made on ``device`` (a GPU fills 1.2 G weights in no time), adapters in bf16
    too."""
    import transformers

    torch.manual_seed(0)
    if workload.quantization is not None:
        return make_quantized_model(workload, device)
    with device:
        config = getattr(transformers, workload.shapes.config_class)(**workload.config)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        if workload.method == "lora":
            model = with_lora(model, workload.shapes.lora_rank)
    return model.train()


def make_quantized_model(workload: Workload, device: torch.device) -> nn.Module:
    """Made on ``device`` one matrix at a time, and kept on the host."""
    import transformers

    from roundpipe.quantized import FORMATS, QuantizedWeight, quantizable

    form = FORMATS[workload.quantization]
    has_sinks = workload.shapes.config_class == "GptOssConfig"
    config = getattr(transformers, workload.shapes.config_class)(**workload.config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager" if has_sinks else "sdpa"
        )
    packed = set(quantizable(model, workload.quantization))
    for path, owner in list(model.named_modules()):
        if any(buffer.is_meta for buffer in owner.buffers(recurse=False)):
            owner.__init__(config=config)  # rotary embeddings compute theirs
        for name, weight in list(owner.named_parameters(recurse=False)):
            made = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            made = made.fill_(1.0) if made.ndim == 1 else made.normal_(std=0.02)
            if f"{path}.{name}" in packed:
                parts = [part.cpu() for part in form.quantize(made)]
                made = QuantizedWeight(form, parts, made.shape, made.dtype)
            setattr(owner, name, nn.Parameter(made.cpu(), requires_grad=False))
    model.tie_weights()
    return with_lora(model, workload.shapes.lora_rank, of_experts=False).train()


def with_lora(model: nn.Module, rank: int, *, of_experts: bool = True) -> nn.Module:
    """On all linear layers, and ``of_experts`` also on stacks of those."""
    from peft import LoraConfig, get_peft_model

    stacks = ("experts.gate_up_proj", "experts.down_proj")
    has_experts = of_experts and any(name.endswith(stacks) for name, _ in model.named_parameters())
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        target_parameters=list(stacks) if has_experts else None,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def make_tokens(workload: Workload) -> Tensor:
    """(rows, length). Every step trains on the same batch, so that a falling loss shows that
    training works."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(
        workload.config["vocab_size"], (workload.rows, workload.length), generator=generator
    )


def make_batches(workload: Workload, count: int, seed: int) -> list[Tensor]:
    """``count`` times (rows, length), of a language that can be learnt: each word is followed by
    one of four.

    The language is the same for any ``seed``.
    """
    generator = torch.Generator().manual_seed(0)
    words = torch.randperm(workload.config["vocab_size"], generator=generator)[:_WORDS]
    followers = torch.randint(_WORDS, (_WORDS, len(_CHANCES)), generator=generator)
    generator.manual_seed(seed)
    places = [torch.randint(_WORDS, (count * workload.rows,), generator=generator)]
    for _ in range(workload.length - 1):
        chosen = torch.multinomial(
            torch.tensor(_CHANCES), len(places[-1]), replacement=True, generator=generator
        )
        places.append(followers[places[-1], chosen])
    return list(words[torch.stack(places, 1)].chunk(count))


def describe(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """What a record says of the workload; what a bound is computed from."""
    config = workload.config
    lora = f"LoRA r={workload.shapes.lora_rank} all-linear"
    return {
        "workload": workload.title,
        "method": "full" if workload.method == "full" else lora,
        "dtype": "bf16 weights, fp32 masters and moments",
        "clipping": MAX_NORM,
        "tokens_per_step": workload.tokens_per_step,
        "length": workload.length,
        "num_microbatch": workload.num_microbatch,
        "params": sum(p.numel() for p in model.parameters()),
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "hidden": config["hidden_size"],
        "layers": config["num_hidden_layers"],
    }
