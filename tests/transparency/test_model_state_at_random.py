"""Random sequences of everything that can set a model's state, against plain PyTorch.

Each seed is a model with every kind of state, a number of devices, optimizers and settings, and
some thirty events: calls, steps of both kinds, writes in every way, loads, failures. The number of
seeds is `ROUNDPIPE_STATE_SEEDS`.
"""

import os
import random
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import ConfigError, RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE
from tests.support.engines import Engines, run_batch
from tests.support.models import mlp_batch
from tests.support.reference import buffers_of, weights_of
from tests.support.stateful import (
    FROZEN,
    LARGE_BUFFER,
    SMALL,
    TIED,
    TRAINED,
    WRITTEN,
    Plain,
    make_stateful,
    tensor_of,
)

SEEDS = int(os.environ.get("ROUNDPIPE_STATE_SEEDS", "36"))
NUM_EVENTS = 30
WEIGHTS = (TRAINED, TIED, "0.weight", "0.bias")
OTHERS = (FROZEN, "5.weight", SMALL, LARGE_BUFFER, WRITTEN)
COUNTED = ("in place", "replaced")
SILENT = ("data", "numpy")


def write(tensor: Any, how: str, value: torch.Tensor) -> None:
    if how == "in place":
        with torch.no_grad():
            tensor.copy_(value)
    elif how == "replaced":
        tensor.data = value.clone()
    elif how == "data":
        tensor.data.copy_(value)
    else:
        tensor.detach().numpy()[...] = value.numpy()


class Sequence:
    """One seed: the engine and its oracle, to which the same things happen."""

    def __init__(self, seed: int, engines: Engines) -> None:
        self.random = random.Random(seed)
        self.devices = self.random.choice([ONE, THREE])
        optim_dtype = self.random.choice([None, torch.float64])
        optim = self.random.choice([torch.optim, roundpipe.optim])
        settings = {"max_gpu_memory": self.random.choice([None, 1.0]), "optim_dtype": optim_dtype}
        self.engine = engines(make_stateful(), self.devices, **settings)
        self.model = self.engine.model
        self.optimizer = optim.SGD(self.engine.optim_parameters(), lr=0.05, momentum=0.5)
        self.plain = Plain(
            make_stateful(), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5), optim_dtype
        )
        self.log = [f"{self.devices}, {optim.__name__}, {settings}"]

    def go_on(self) -> None:
        events = [self.call, self.step, self.flush, self.evaluate, self.load, self.fail]
        writes = [self.write_weight, self.write_other, self.write_behind_an_update]
        (event,) = self.random.choices([*events, *writes], weights=[6, 5, 1, 1, 1, 1, 3, 3, 2], k=1)
        self.log.append(event.__name__)
        event()

    def batch(self) -> Any:
        return mlp_batch(rows=6, seed=self.random.randrange(100))

    def check(self, actual: Any, expected: Any) -> None:
        self.devices.check(actual, expected, bitwise=False)

    def call(self) -> None:
        batch, count = self.batch(), self.random.choice([1, 2, 3])
        loss = run_batch(self.engine, batch, count)
        self.check(loss.detach(), self.plain.forward_backward(batch, count))

    def step(self) -> None:
        is_async = self.random.random() < 0.5
        self.log[-1] += f" is_async={is_async}"
        self.latest_step = self.engine.step(self.optimizer.step, is_async=is_async)
        self.plain.step(is_async=is_async)

    def flush(self) -> None:
        self.engine.synchronize()
        self.plain.flush()
        self.check(weights_of(self.model), weights_of(self.plain.model))
        self.check(buffers_of(self.model), buffers_of(self.plain.model))

    def evaluate(self) -> None:
        (inputs,) = self.batch().args
        with torch.no_grad():
            one = RoundPipeRunConfig(num_microbatch=1)
            actual = self.engine(inputs, roundpipe_run_config=one)
            self.plain.flush()
            self.check(actual, self.plain.model(inputs))

    def fail(self) -> None:
        batch = self.batch()._replace(loss_fn=lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_batch(self.engine, batch, 2)

    def new_value(self, name: str) -> torch.Tensor:
        """Of which the first half is as it was."""
        now: torch.Tensor = tensor_of(self.plain.model, name).detach().clone()
        factor = self.random.choice([0.5, 0.9, 1.1])
        now.view(-1)[now.numel() // 2 * self.random.randrange(2) :] *= factor
        return now

    def write_weight(self) -> None:
        """After synchronize(). Silent ones are told of."""
        name, how = self.random.choice(WEIGHTS), self.random.choice([*COUNTED, *SILENT])
        self.flush()
        self.set(name, how, is_told=how in SILENT or self.random.random() < 0.2)

    def write_other(self) -> None:
        name, how = self.random.choice(OTHERS), self.random.choice([*COUNTED, *SILENT])
        is_small_buffer = name in (SMALL, WRITTEN)
        is_told = how in SILENT and not is_small_buffer
        if is_told or not is_small_buffer:  # a late backward may be about to read it
            self.flush()
        self.set(name, how, is_told=is_told)

    def set(self, name: str, how: str, *, is_told: bool) -> None:
        self.log[-1] += f" {name} {how} is_told={is_told}"
        value = self.new_value(name).to(tensor_of(self.model, name).dtype)
        write(tensor_of(self.model, name), how, value)
        if is_told:
            self.engine.reload_parameters()
            self.plain.load({name: value})
            return
        with torch.no_grad():
            tensor_of(self.plain.model, name).copy_(value)

    def write_behind_an_update(self) -> None:
        if not self.plain.is_behind:
            return
        name, how = self.random.choice(WEIGHTS), self.random.choice(COUNTED)
        self.log[-1] += f" {name} {how}"
        # Until then late backward stage runs may compute the update's gradients with the write.
        self.latest_step.wait()
        write(tensor_of(self.model, name), how, self.new_value(name))
        with pytest.raises(ConfigError, match=rf"'{name}' was changed .* call synchronize\(\)"):
            self.random.choice([self.engine.synchronize, self.engine.zero_grad])()
        self.plain.gradients = {}
        self.plain.flush()

    def load(self) -> None:
        names = self.random.sample([*WEIGHTS, *OTHERS], 4)
        self.log[-1] += f" {names}"
        values = {name: self.new_value(name).to(torch.float64) * 1.01 for name in names}
        if self.random.random() < 0.5:
            self.engine.load_state_dict(values, strict=False)
        else:
            self.flush()
            values = {name: value.float() for name, value in values.items()}
            self.model.load_state_dict(values, strict=False)
            self.engine.reload_parameters()
        self.plain.flush()
        self.plain.load(values)
        masters = dict(self.engine.optim_named_parameters())
        for name in masters.keys() & values.keys():
            assert torch.equal(masters[name].detach(), values[name].to(masters[name].dtype))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_is_done_to_a_model_it_is_what_plain_pytorch_would_have(
    seed: int, engines: Engines
) -> None:
    sequence = Sequence(seed, engines)
    try:
        for _ in range(NUM_EVENTS):
            sequence.go_on()
        sequence.flush()
        assert sequence.log, "nothing was compared"
    except BaseException as error:
        error.add_note("\n".join(sequence.log))
        raise
