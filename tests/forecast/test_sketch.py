"""What the meta device shows is what a run with values shows."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig

from roundpipe.errors import ConfigError
from roundpipe.forecast.models import imagine
from roundpipe.forecast.sketch import batch_of, least_bytes, sketches
from roundpipe.presets.preset import cut

from .runs import Setup, small_config, small_model

ROWS, TOKENS = 2, 24


def batch(device: str) -> dict[str, Any]:
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids, "skip_logits": True}


@pytest.mark.parametrize("lora", [None, 4], ids=["full", "lora"])
def test_layers_hold_on_the_meta_device_what_they_hold_on_the_cpu(lora: int | None) -> None:
    made = cut(small_model(Setup(memory="1GB", lora=lora)).train())
    assert made is not None
    imagined = imagine(small_config(), lora=lora)
    assert sketches(imagined.layers, batch("meta")) == sketches(list(made.sequential), batch("cpu"))


def test_operations_are_those_of_products_and_half_the_scores() -> None:
    """Forward 2 operations a weight and token, backward twice that; of scores two products."""
    config = small_config()
    block = sketches(imagine(config, lora=None).layers, batch("meta"))[2]
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    key_width = width * config.num_key_value_heads // heads
    weights = 2 * width * width + 2 * width * key_width + 3 * width * inner
    scores = 2 * ROWS * heads * TOKENS * TOKENS * (width // heads)
    # The rotary embedding's and norms' operations are no products.
    assert block.forward == 2 * ROWS * TOKENS * weights + scores
    assert block.backward == 4 * ROWS * TOKENS * weights + scores * 5 // 2


@pytest.mark.parametrize("at_once", [0, 256])
def test_what_long_rows_keep_is_known_from_short_ones(at_once: int) -> None:
    layers = imagine(small_config(), lora=4).layers
    kept = max(one.saved for one in sketches(layers, batch_of(2, 3000), at_once))
    assert 0.98 * kept < least_bytes(layers, 2 * 3000, in_parts=at_once > 0) <= kept


def test_a_frozen_first_layer_has_no_backward() -> None:
    first, *blocks, _ = sketches(imagine(small_config(), lora=4).layers, batch("meta"))
    assert first.backward == first.backward_peak == 0
    assert all(block.backward > 0 for block in blocks)


class LooksAtValues(nn.Module):
    def forward(self, **inputs: Any) -> Any:
        return inputs["input_ids"].nonzero()


def test_a_layer_that_looks_at_values_is_named() -> None:
    with pytest.raises(ConfigError, match="layer 0 .LooksAtValues. does not run without values"):
        sketches([LooksAtValues()], batch("meta"))


@pytest.mark.parametrize("lora", [None, 4], ids=["full", "lora"])
def test_experts_count_for_the_tokens_that_reach_them(lora: int | None) -> None:
    """Each token passes through two of four experts, whose weights are three matrices."""
    width, inner = 64, 32
    config = Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=width,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        dtype="bfloat16",
    )
    block = sketches(imagine(config, lora=lora).layers, batch("meta"))[2]
    experts = 2 * ROWS * TOKENS * 2 * 3 * width * inner
    attention = 2 * ROWS * TOKENS * (4 * width * width + 4 * width)
    assert experts + attention <= block.forward <= 1.5 * (experts + attention)
    assert block.saved > 0
