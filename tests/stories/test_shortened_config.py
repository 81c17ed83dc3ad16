"""A config whose number of blocks was lowered still lists the kinds of all that there were.

transformers runs such a model, reading as many kinds as there are blocks. The preset insisted on
equal numbers and gave an error of `zip`.
"""

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM

from roundpipe.engine.wrap import wrap_model_to_roundpipe

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_a_config_may_know_of_more_blocks_than_there_are(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "qwen3":
        config, model_class = Qwen3Config(**SIZES), Qwen3ForCausalLM
    else:
        config, model_class = (
            GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1),
            GptOssForCausalLM,
        )
    config.num_hidden_layers = 2
    model = model_class(config).eval()
    ids = torch.randint(0, 64, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits
        with wrap_model_to_roundpipe(model, use_sequential_preset=True, devices=2) as engine:
            torch.testing.assert_close(engine(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
