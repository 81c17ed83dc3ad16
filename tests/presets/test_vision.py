"""Models that see run as a sequence: loss, logits and gradients are those of their own forward,
whatever images are in which rows."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from roundpipe import RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.preset_models import ROWS, TOKENS, gradients_of, own_forward
from tests.support.tolerances import assert_same_sums
from tests.support.vision_models import NO_IMAGES, NUM_IMAGES, SEEING, make_seeing, seen_batch

CUTS = [(1, ONE), (ROWS, ONE), (1, THREE), (2, THREE), (ROWS, THREE)]


def loss_of(output: Any, _: Any) -> torch.Tensor:
    return output.loss


def assert_is_model(
    engines: Engines, model: Any, batches: list[dict[str, Any]], count: int, devices: DeviceSet
) -> None:
    expected = [own_forward(copy.deepcopy(model), batch) for batch in batches]
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=count)
    for batch, (theirs, their_gradients) in zip(batches, expected, strict=True):
        loss, ours = engine.forward_backward(
            input_kwargs=batch, loss_fn=loss_of, return_outputs=True, run_config=config
        )
        engine.synchronize()
        assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(ours.logits, theirs.logits, terms=TOKENS)
        assert_same_sums(gradients_of(engine.model), their_gradients, terms=ROWS * TOKENS)
        engine.zero_grad()
        # Without logits, and for evaluation.
        loss = engine.forward_backward(input_kwargs=batch, run_config=config)
        engine.synchronize()
        assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(gradients_of(engine.model), their_gradients, terms=ROWS * TOKENS)
        engine.zero_grad()
        with torch.no_grad():
            ours = engine(**batch, roundpipe_run_config=config)
        assert_same_sums(ours.logits, theirs.logits, terms=TOKENS)


@pytest.mark.parametrize(("count", "devices"), CUTS, ids=str)
@pytest.mark.parametrize("name", SEEING)
def test_with_images_in_some_rows_and_none(
    engines: Engines, name: str, count: int, devices: DeviceSet
) -> None:
    model = make_seeing(name)
    batches = [seen_batch(model, images) for images in (NUM_IMAGES, NO_IMAGES, (0, 1, 0, 2))]
    assert_is_model(engines, model, batches, count, devices)
