"""T5 and mT5 as one sequence are their own forward: outputs, loss and gradients, whatever is cut.

Bitwise where nothing is, but for the gradients of what several layers share: position tables and
tied embeddings, whose parts are summed in another order.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.preset_models import gradients_of, own_forward
from tests.support.tolerances import assert_same_sums

ROWS, SOURCE, TARGET = 4, 9, 7
# To a weight of the encoder's: over source tokens, the gradients of each over target tokens.
SUMMED = ROWS * SOURCE * TARGET
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**SIZES))


def gated_t5() -> Any:
    """The head is not tied, and the decoder is shorter, as in T5 1.1."""
    torch.manual_seed(0)
    config = T5Config(
        **SIZES, num_decoder_layers=2, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    )
    return T5ForConditionalGeneration(config)


def mt5() -> Any:
    torch.manual_seed(0)
    return MT5ForConditionalGeneration(MT5Config(**SIZES, feed_forward_proj="gated-gelu"))


def adapted() -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q", "v", "wo"], init_lora_weights=False)
    return get_peft_model(t5(), config)


def sources() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (ROWS, SOURCE), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    mask[2, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def labels() -> Tensor:
    """A row has none that counts, so a microbatch may have none."""
    made = torch.randint(1, 50, (ROWS, TARGET), generator=torch.Generator().manual_seed(1))
    made[0, 3:] = -100
    made[3] = -100
    return made


def labelled() -> dict[str, Any]:
    return {**sources(), "labels": labels()}


def started() -> dict[str, Any]:
    """Some of what the decoder starts with is padding; the loss is of other labels."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 50, (ROWS, TARGET), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {**labelled(), "decoder_input_ids": ids, "decoder_attention_mask": mask}


def embedded() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    embeds = torch.randn(ROWS, SOURCE, SIZES["d_model"], generator=generator)
    of_decoder = torch.randn(ROWS, TARGET, SIZES["d_model"], generator=generator)
    return {"inputs_embeds": embeds, "decoder_inputs_embeds": of_decoder, "labels": labels()}


def config_of(model: Any, num_microbatch: int, devices: DeviceSet) -> RoundPipeRunConfig:
    """On three devices the blocks of both stacks are recomputed, apart and together."""
    layers = (
        3 + len(model.get_submodule("encoder.block")) + len(model.get_submodule("decoder.block"))
    )
    plan = ModelExecutePlan(
        [range(2), range(2, layers - 2)],
        [range(layers - 2, layers), range(1, layers - 2), range(1)],
    )
    return RoundPipeRunConfig(
        num_microbatch=num_microbatch, execute_plan=plan if devices is THREE else None
    )


@pytest.mark.parametrize(
    ("num_microbatch", "devices"), [(1, ONE), (1, THREE), (3, ONE), (4, THREE)]
)
@pytest.mark.parametrize("inputs", [labelled, started, embedded])
@pytest.mark.parametrize(
    "make", [t5, *(pytest.param(make, marks=pytest.mark.slow) for make in (gated_t5, mt5, adapted))]
)
def test_is_the_model(
    engines: Engines,
    make: Callable[[], Any],
    inputs: Callable[[], dict[str, Any]],
    num_microbatch: int,
    devices: DeviceSet,
) -> None:
    model, kwargs = make(), inputs()
    config = config_of(getattr(model, "base_model", model), num_microbatch, devices)
    theirs, gradients = own_forward(copy.deepcopy(model), kwargs)
    engine = engines(model, devices)
    assert isinstance(engine, RoundPipe)
    loss, ours = engine.forward_backward(
        input_kwargs=kwargs,
        loss_fn=lambda output, _: output.loss,
        return_outputs=True,
        run_config=config,
    )
    engine.synchronize()
    assert_same_sums(loss, theirs.loss, terms=ROWS * TARGET)
    assert_same_sums(gradients_of(model), gradients, terms=SUMMED)
    assert type(ours) is type(theirs)
    for name in ("loss", "logits", "encoder_last_hidden_state"):
        assert_same_sums(ours[name], theirs[name], terms=SOURCE)
        assert num_microbatch > 1 or torch.equal(ours[name], theirs[name])


def test_only_the_loss(engines: Engines) -> None:
    """Nobody looks at logits, and a number to divide by changes nothing, as in the model."""
    model = t5()
    theirs, gradients = own_forward(copy.deepcopy(model), labelled())
    engine = engines(model, THREE)
    loss = engine.forward_backward(
        input_kwargs={**labelled(), "num_items_in_batch": torch.tensor(5)},
        loss_fn=lambda output, _: output.loss,
        run_config=config_of(model, 4, THREE),
    )
    engine.synchronize()
    assert_same_sums(loss, theirs.loss, terms=ROWS * TARGET)
    assert_same_sums(gradients_of(model), gradients, terms=SUMMED)


def test_without_labels(engines: Engines) -> None:
    model, kwargs = gated_t5().eval(), started()
    del kwargs["labels"]
    with torch.no_grad():
        theirs = model(**kwargs)
        ours = engines(model, THREE)(**kwargs, roundpipe_run_config=config_of(model, 4, THREE))
    assert ours.loss is None
    assert_same_sums(ours.logits, theirs.logits, terms=SOURCE)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"encoder_outputs": (torch.zeros(ROWS, SOURCE, 16),)}, "encoder_outputs: .*itself"),
        ({"use_cache": True}, "key-value cache"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"lable": labels()}, "lable=.*nothing in it reads"),
    ],
)
def test_what_is_refused(engines: Engines, more: dict[str, Any], said: str) -> None:
    engine = engines(t5(), ONE)
    with pytest.raises(ConfigError, match=said):
        engine(**labelled(), **more)
