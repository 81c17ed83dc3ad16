"""OPT with layer drop ended in ``'OPTDecoder' object has no attribute 'final_layer_norm'``.

In training its forward leaves out each block with some probability. The generic preset runs the
model's forward up to its last block, to note what the blocks are called with; if that one was left
out, the forward went on into what was not there. Nor did anybody see it where the forward's second
part left out the last block, which there stands for all: the loss was then that of zeros.

The trial that the preset makes was in evaluation. Now it looks at training too, with the dice
loaded, and such a model runs by parts, by its own forward: a block that this does not call does not
run.
"""

import copy
import logging
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import ConfigError
from roundpipe.engine.partitioned import AutoRoundPipe
from roundpipe.presets.parts import Blocks, Part
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.optimizers import PausingSGD, random_delays
from tests.support.reference import Reference

LAYERS, STEPS = 3, 6
one_and_three = pytest.mark.parametrize("devices", [ONE, THREE], ids=str)


def make_opt(layerdrop: float) -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=50,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=LAYERS,
        ffn_dim=32,
        num_attention_heads=2,
        max_position_embeddings=32,
        dropout=0.0,
        layerdrop=layerdrop,
    )
    return OPTForCausalLM(config).train()


def make_xglm(layerdrop: float) -> Any:
    from transformers import XGLMConfig, XGLMForCausalLM

    torch.manual_seed(0)
    config = XGLMConfig(
        vocab_size=50,
        d_model=16,
        num_layers=LAYERS,
        ffn_dim=32,
        attention_heads=2,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=layerdrop,
    )
    return XGLMForCausalLM(config).train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (6, 5), generator=generator)
    return {"input_ids": ids, "labels": ids}


@one_and_three
@pytest.mark.parametrize("make", [make_opt, make_xglm])
def test_the_blocks_that_plain_pytorch_skips_are_skipped(
    devices: DeviceSet, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Loss and gradients, step by step, from the same draws; what was skipped has no gradient."""
    model = make(0.5)
    plain, skipped = copy.deepcopy(model), set()
    with (
        caplog.at_level(logging.WARNING, "roundpipe"),
        roundpipe.wrap_model_to_roundpipe(model, devices=devices.argument) as engine,
    ):
        assert isinstance(engine, AutoRoundPipe)
        assert "may skip blocks" in caplog.text
        for seed in range(STEPS):
            torch.manual_seed(seed)
            expected = plain(**batch(seed)).loss
            expected.backward()
            torch.manual_seed(seed)
            loss = engine(**batch(seed)).loss
            loss.backward()
            engine.synchronize()
            devices.check(loss, expected, bitwise=False)
            wanted, found = (
                {n: p.grad.clone() for n, p in each.named_parameters() if p.grad is not None}
                for each in (plain, model)
            )
            devices.check(found, wanted, bitwise=False)
            skipped |= {n for n, p in plain.named_parameters() if p.grad is None}
            for each in (plain, engine, model):
                each.zero_grad()
    assert len({name.split(".layers.")[1][0] for name in skipped}) == LAYERS


@one_and_three
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_momentum_of_skipped_blocks(devices: DeviceSet, is_async: bool) -> None:
    """An optimizer leaves alone what has no gradient: no momentum, no decay in that step."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    model = make_opt(0.5)
    reference = Reference(
        model, lambda params: torch.optim.SGD(params, **options), staleness=int(is_async)
    )
    with roundpipe.wrap_model_to_roundpipe(model, devices=devices.argument) as engine:
        optimizer = PausingSGD(engine.optim_parameters(), pause=random_delays(3), **options)
        for seed in range(STEPS):
            torch.manual_seed(seed)
            given = batch(seed)
            expected = reference.forward_backward(
                [((), given, None)], lambda output, _: output.loss
            )
            reference.step()
            torch.manual_seed(seed)
            loss = engine(**given).loss
            loss.backward()
            devices.check(loss, expected, bitwise=False)
            engine.step(optimizer.step, is_async=is_async)


def test_no_layer_drop_runs_as_a_sequence() -> None:
    with roundpipe.wrap_model_to_roundpipe(make_opt(0.0), devices=1) as engine:
        assert isinstance(engine, roundpipe.RoundPipe)


def test_layer_drop_switched_on_afterwards_is_refused() -> None:
    """In training, by name; evaluation skips nothing."""
    model = make_opt(0.0)
    with roundpipe.wrap_model_to_roundpipe(model, devices=1) as engine:
        model.model.decoder.layerdrop = 1.0
        with pytest.raises(ConfigError, match=r"called 0 of its 3 blocks .* \(layer drop\?\)"):
            engine(**batch(0))
        model.eval()
        assert torch.isfinite(engine(**batch(0)).loss)


def test_a_second_part_that_skips_the_last_block_is_refused() -> None:
    """It would go on with the zeros that stand for the embeddings."""
    model = make_opt(1.0)
    part = Part(model, Blocks(("model", "decoder", "layers"), LAYERS, None), lambda _: True)
    hidden_states = torch.randn(2, 5, 16)
    with pytest.raises(ConfigError, match="called 0 of its 3 blocks"):
        part.last(hidden_states, inputs_embeds=torch.zeros_like(hidden_states))
    with pytest.raises(ConfigError, match="called 0 of its 3 blocks"):
        part.into("lm_head", hidden_states, inputs_embeds=torch.zeros_like(hidden_states))
