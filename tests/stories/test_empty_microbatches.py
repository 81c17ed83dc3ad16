"""A microbatch without any unmasked label turned the whole step to NaN; odd batch sizes crashed or
were padded.

0/0 inside one microbatch, and integer division in the split. Here rows are masked whole, batches
have 5, 3 and 1 rows for 4 microbatches, and everything equals the one-shot result.

Source: EleutherAI/bergson#461, pytorch/PiPPy#795, pytorch/pytorch#126600.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import llama_batch, make_llama
from tests.support.reference import Reference, plain_call, weights_of


def sgd(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(
    ("num_labels", "num_microbatch"),
    [([9, 0, 11, 0], 4), ([9, 4, 11, 2, 7], 4), ([9], 4), ([9, 4, 11], 4)],
    ids=["masked rows", "5 rows", "1 row", "3 rows"],
)
def test_odd_batches_equal_the_one_shot_result(
    num_labels: list[int], num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    model = make_llama(tied=False)
    rows_seen: list[int] = []

    def count_rows(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows_seen.append(len(args[0]))

    batch = llama_batch(num_labels)
    expected = plain_call(copy.deepcopy(model), batch.whole(), batch.loss_fn)
    model.model.layers[0].register_forward_pre_hook(count_rows)
    engine = engines(model, devices)
    loss = run_batch(engine, batch, num_microbatch)
    devices.check(loss, expected.loss, bitwise=False)
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)
    assert min(rows_seen) >= 1
    assert sum(rows_seen) % len(num_labels) == 0, "a row was dropped or used twice"


def test_a_batch_without_labels_updates_nothing(devices: DeviceSet, engines: Engines) -> None:
    model = make_llama(tied=False)
    start = weights_of(model)
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    loss = run_batch(engine, llama_batch([0, 0, 0, 0]), 4)
    assert float(loss) == 0.0
    engine.step(optimizer.step, is_async=False)
    weights = engine_weights(engine)
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    devices.check(weights, start)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_smaller_last_batch_trains_as_in_plain_pytorch(
    is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    """Batches of 4, 4 and 3 rows, `drop_last=False`, twice."""
    model = make_llama(tied=False)
    reference = Reference(model, sgd, staleness=int(is_async))
    engine = engines(model, devices)
    optimizer = sgd(engine.optim_parameters())
    for seed, num_labels in enumerate([[9, 4, 11, 2], [3, 12, 5, 8], [6, 10, 7]] * 2):
        batch = llama_batch(num_labels, seed)
        reference.forward_backward(batch.whole(), batch.loss_fn)
        reference.step()
        run_batch(engine, batch, 4)
        engine.step(optimizer.step, is_async=is_async)
    devices.check(engine_weights(engine), reference.weights, bitwise=False)
