"""On a GPU modules that run for some tokens at a time give what whole ones do, compiled or not, and
take less of its memory."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from tests.support.device_sets import ACCELERATORS
from tests.support.engines import engine_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
TOKENS = 32768


def trained(tokens_at_once: int, *, compile: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """The loss, the gradients, and the most that was in use."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    model = LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(512, (1, TOKENS))
    settings = RoundPipeRunConfig(
        num_microbatch=1, recompute_grain="layer", tokens_at_once=tokens_at_once
    )
    with wrap_model_to_roundpipe(
        model, devices=["cuda:0"], compile=compile, model_run_config=settings
    ) as engine:
        for _ in range(2):  # compiling takes memory of its own
            engine.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            loss = engine.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
            engine.synchronize()
        return loss, engine_gradients(engine), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("compile", [False, True])
def test_parts_give_what_the_whole_does_in_less_memory(compile: bool) -> None:
    loss, expected, whole = trained(0, compile=compile)
    found_loss, found, cut = trained(1024, compile=compile)
    torch.testing.assert_close(found_loss, loss, rtol=1e-3, atol=1e-3)
    for name, gradient in found.items():
        # Both are rounded to bfloat16 in other places.
        error = (gradient - expected[name]).float().norm() / expected[name].float().norm()
        assert error < 0.03, name
    assert cut < (0.8 if compile else 0.6) * whole
