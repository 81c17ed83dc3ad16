"""Prints the README's table of what fits: host memory that training takes beside cards of several
sizes, as `roundpipe.estimate` predicts it from sizes alone. Nothing is loaded, and no GPU used."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig
from workload import MODELS

import roundpipe
from roundpipe.errors import PlanError
from roundpipe.forecast.machine import PROCESS_BYTES

CARDS = ("12GB", "24GB", "80GB")
SEQ, ROWS = 2048, 8
NF4 = {"quantization": "nf4"}


class Row(NamedTuple):
    """``settings``: those of `roundpipe.estimate`."""

    model: str
    title: str
    how: str
    settings: dict[str, Any]


ROWS_OF_TABLE = [
    Row("qwen3-1.7b", "Qwen3-1.7B", "all weights, AdamW", {"optimizer": "adamw"}),
    Row("qwen3-4b", "Qwen3-4B", "all weights, AdamW", {"optimizer": "adamw"}),
    Row("llama-3-8b", "Llama-3-8B", "all weights, 8-bit AdamW", {"optimizer": "adamw_8bit"}),
    Row("llama-3-8b", "Llama-3-8B", "LoRA, rank 32", {"lora": 32, "quantization": "none"}),
    Row("llama-3-8b", "Llama-3-8B", "LoRA over NF4, rank 32", {"lora": 32, "quantization": "nf4"}),
    Row("qwen3-32b", "Qwen3-32B", "LoRA over NF4, rank 32", {"lora": 32, "quantization": "nf4"}),
    Row(
        "llama-3-70b", "Llama-3-70B", "LoRA over NF4, rank 16", {"lora": 16, "quantization": "nf4"}
    ),
]


def config_of(name: str) -> PreTrainedConfig:
    shapes = MODELS[name]
    kind = getattr(transformers, shapes.config_class)
    config: PreTrainedConfig = kind(
        **shapes.config,
        dtype=torch.bfloat16,
        architectures=[shapes.config_class.replace("Config", "ForCausalLM")],
    )
    return config


def cell(row: Row, card: str) -> str:
    """Host memory in GB, the process's own included, or "no"."""
    try:
        best, *_ = roundpipe.estimate(
            config_of(row.model),
            seq=SEQ,
            batch=ROWS,
            num_microbatch=ROWS,
            async_optimizer=False,
            pin_model="alloc",
            gpu_memory=card,
            ram="4000GB",
            **row.settings,
        )
    except PlanError:
        return "no"
    return f"{(best.host_bytes + PROCESS_BYTES) / 1e9:.0f} GB"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        yield f"| {row.title} | {row.how} | {' | '.join(cell(row, card) for card in CARDS)} |"


def heading() -> list[str]:
    titles = [f"{card.removesuffix('GB')} GB card" for card in CARDS]
    return [f"| model | trained | {' | '.join(titles)} |", "| --- | --- |" + " ---: |" * len(CARDS)]


if __name__ == "__main__":
    print("\n".join(heading()))
    for line in lines(ROWS_OF_TABLE):
        print(line, flush=True)
