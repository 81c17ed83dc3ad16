"""A pipelined run of a model gave gradients of another scale than the plain run.

Each microbatch was normalised on its own, and the results averaged: with rows of 2, 5, 9 and 11
valid labels the short rows then weigh as much as the long ones (4.1684 instead of 4.1889). Here the
user's `loss_fn` divides by the batch's number of tokens and the engine only ever adds.

Source: pytorch/torchtitan#2972, huggingface/transformers#37766.
"""

import copy

import pytest
import torch
from torch import nn

from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import llama_batch, make_llama
from tests.support.reference import plain_call


@pytest.mark.parametrize("num_microbatch", [1, 2, 4])
def test_every_split_gives_the_loss_and_gradients_of_the_whole_batch(
    num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    model = make_llama(tied=False)
    batch = llama_batch([2, 5, 9, 11])
    whole = copy.deepcopy(model)
    expected = plain_call(whole, batch.whole(), batch.loss_fn)
    logits = whole(**batch.kwargs).logits[:, :-1]
    means = [
        nn.functional.cross_entropy(row, label[1:], ignore_index=-100)
        for row, label in zip(logits, batch.label, strict=True)
    ]
    assert abs(torch.stack(means).mean() - expected.loss) > 1e-3, (
        "the wrong answer must be tellable from the right one"
    )
    engine = engines(model, devices)
    devices.check(run_batch(engine, batch, num_microbatch), expected.loss, bitwise=False)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)
