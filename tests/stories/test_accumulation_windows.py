"""Accumulating over several calls rescaled what was accumulated before.

A call that owns the divisor cannot be called twice: the second call divides the first one's share
again, and a short last window is divided by the full one's size. Here three calls of two
microbatches make one step, and the gradient is the sum of the three single-call gradients.

Source: pytorch/torchtitan#1733, modelscope/ms-swift#10084, huggingface/transformers#37923.
"""

import torch

from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import make_mlp, mlp_batch
from tests.support.reference import plain_call, weights_of

LEARNING_RATE = 0.1


def test_three_calls_then_one_step_apply_the_sum_of_the_three_gradients(
    devices: DeviceSet, engines: Engines
) -> None:
    model = make_mlp()
    start = weights_of(model)
    batches = [mlp_batch(rows=4, seed=seed) for seed in range(3)]
    singles = [plain_call(make_mlp(), batch.split(2), batch.loss_fn).gradients for batch in batches]
    total = {name: singles[0][name] + singles[1][name] + singles[2][name] for name in start}
    engine = engines(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=LEARNING_RATE)
    for count, batch in enumerate(batches, start=1):
        run_batch(engine, batch, 2)
        so_far = {
            name: sum((single[name] for single in singles[1:count]), singles[0][name])
            for name in start
        }
        devices.check(engine_gradients(engine), so_far)
    engine.step(optimizer.step, is_async=False)
    expected = {
        name: torch.add(value, total[name], alpha=-LEARNING_RATE) for name, value in start.items()
    }
    devices.check(engine_weights(engine), expected)


def test_a_short_last_window_neither_rescales_nor_leaks(
    devices: DeviceSet, engines: Engines
) -> None:
    """Windows of 3 and 1 calls, twice over: each step applies its own window's gradient and nothing
    else."""
    engine = engines(make_mlp(), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=LEARNING_RATE)
    plain = make_mlp()
    seed = 0
    for window in (3, 1, 3, 1):
        total = None
        for _ in range(window):
            batch = mlp_batch(rows=4, seed=seed)
            seed += 1
            run_batch(engine, batch, 2)
            gradients = plain_call(plain, batch.split(2), batch.loss_fn).gradients
            total = (
                gradients
                if total is None
                else {name: total[name] + gradients[name] for name in total}
            )
        engine.step(optimizer.step, is_async=False)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.add_(total[name], alpha=-LEARNING_RATE)
        devices.check(engine_weights(engine), weights_of(plain))
