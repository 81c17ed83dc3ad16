"""Every cell of the table in docs/internals/model-state.md: what can set a model's state, times
what is set.

Some of it was not seen, and nothing said so: buffers and frozen weights kept their old values on
devices after a write through ``.data`` or NumPy, buffers even after `reload_parameters`; a frozen
weight that was given other memory was taken for the old one when its address was used again; an
embedding with ``max_norm`` lost what its forward wrote; and a master that was 1.0015 stayed so
after a load of 1.0 into bf16 weights, because the weight had been 1.0 before.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, RoundPipe, RoundPipeRunConfig
from tests.support.device_sets import ONE, DeviceSet
from tests.support.engines import Engines, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, make_mlp, mlp_batch
from tests.support.reference import buffers_of, plain_call, weights_of
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

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(3)]
BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
ROOM_GB = 1.0  # so that devices keep what they have


def in_place(tensor: Any, value: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


def replaced(tensor: Any, value: Tensor) -> None:
    tensor.data = value.clone()


def through_data(tensor: Any, value: Tensor) -> None:
    tensor.data.copy_(value)


def through_numpy(tensor: Any, value: Tensor) -> None:
    tensor.detach().numpy()[...] = value.numpy()


COUNTED, SILENT = [in_place, replaced], [through_data, through_numpy]
WEIGHTS = [TRAINED, TIED]
SEEN = [
    *((name, how, False) for name in (*WEIGHTS, FROZEN, LARGE_BUFFER) for how in COUNTED),
    *((name, how, False) for name in (SMALL, WRITTEN) for how in (*COUNTED, *SILENT)),
    *((name, how, True) for name in (*WEIGHTS, FROZEN, LARGE_BUFFER) for how in SILENT),
]
"""What is set, how, and whether `reload_parameters` has to be called."""


class Pair:
    """An engine and its oracle. ``train`` does the same with both and compares."""

    def __init__(
        self,
        engines: Engines,
        devices: DeviceSet,
        *,
        is_async: bool = False,
        dtype: torch.dtype = torch.float32,
        lr: float = 0.05,
    ) -> None:
        self.devices, self.is_async, self.dtype = devices, is_async, dtype
        model = make_stateful(dtype)
        self.engine = engines(model, devices, optim_dtype=torch.float32, max_gpu_memory=ROOM_GB)
        self.model = model

        def sgd(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=lr, momentum=0.5)

        self.optimizer = sgd(self.engine.optim_parameters())
        self.plain = Plain(make_stateful(dtype), sgd, torch.float32)

    def train(self, num_steps: int = 2) -> None:
        for batch in BATCHES[:num_steps]:
            batch = batch._replace(
                args=(batch.args[0].to(self.dtype),), label=batch.label.to(self.dtype)
            )
            loss = run_batch(self.engine, batch, 2)
            self.engine.step(self.optimizer.step, is_async=self.is_async)
            self.check(loss.detach(), self.plain.forward_backward(batch, 2))
            self.plain.step(is_async=self.is_async)

    def flush(self) -> None:
        self.engine.synchronize()
        self.plain.flush()

    def check_all(self) -> None:
        self.flush()
        self.check(weights_of(self.model), weights_of(self.plain.model))
        self.check(buffers_of(self.model), buffers_of(self.plain.model))

    def check(self, actual: Any, expected: Any) -> None:
        self.devices.check(actual, expected, bitwise=False)


@BOTH
@pytest.mark.parametrize(("name", "how", "is_told"), SEEN)
def test_what_is_written_between_steps_is_seen(
    name: str,
    how: Callable[[Any, Tensor], None],
    is_told: bool,
    is_async: bool,
    devices: DeviceSet,
    engines: Engines,
) -> None:
    """By the next call, and by the next update."""
    pair = Pair(engines, devices, is_async=is_async)
    for factor in (2.0, 0.5, 1.5):
        pair.train()
        pair.flush()
        value = tensor_of(pair.plain.model, name).detach() * factor
        how(tensor_of(pair.model, name), value)
        if is_told:
            pair.engine.reload_parameters()
            pair.plain.load({name: value})
        else:
            in_place(tensor_of(pair.plain.model, name), value)
    pair.train()
    pair.check_all()


@pytest.mark.parametrize("name", [*WEIGHTS, FROZEN, SMALL, LARGE_BUFFER, WRITTEN])
@pytest.mark.parametrize("how", ["engine", "model"])
@BOTH
def test_what_is_loaded_is_seen(
    how: str, name: str, is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    pair = Pair(engines, devices, is_async=is_async)
    pair.train()
    values = {name: tensor_of(pair.plain.model, name).detach() * 2}
    if how == "engine":
        pair.engine.load_state_dict(values, strict=False)
    else:
        pair.flush()
        pair.model.load_state_dict(values, strict=False)
        pair.engine.reload_parameters()
    pair.plain.flush()
    pair.plain.load(values)
    pair.train()
    pair.check_all()


@BOTH
@pytest.mark.parametrize("how", COUNTED)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_written_while_an_update_is_on_its_way_is_refused(
    name: str, how: Any, is_async: bool, devices: DeviceSet, engines: Engines
) -> None:
    """The update stays, and training goes on from it. A synchronous step is behind only while it
    writes back, so there the write is made in ``step_fn``."""
    pair = Pair(engines, devices, is_async=is_async)
    pair.train()
    written = tensor_of(pair.model, name)

    def step() -> None:
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        how(written, torch.zeros_like(written))

    run_batch(pair.engine, BATCHES[0], 2)
    handle = pair.engine.step(pair.optimizer.step if is_async else step, is_async=is_async)
    pair.plain.forward_backward(BATCHES[0], 2)
    pair.plain.step(is_async=is_async)
    if is_async:
        handle.wait()  # or late backward stage runs compute this update's gradients with the write
        how(written, torch.zeros_like(written))
    with pytest.raises(ConfigError, match=rf"'{name}' was changed .* call synchronize\(\)"):
        pair.engine.synchronize()
    pair.check_all()
    pair.train()
    pair.check_all()


def test_a_write_that_closing_would_overwrite_is_refused(engines: Engines) -> None:
    pair = Pair(engines, ONE, is_async=True)
    pair.train()
    in_place(tensor_of(pair.model, "0.weight"), torch.zeros(MLP_WIDTH, MLP_WIDTH))
    with pytest.raises(ConfigError, match="'0.weight' was changed"):
        pair.engine.close()
    pair.plain.flush()
    pair.check(weights_of(pair.model), weights_of(pair.plain.model))


def test_a_write_between_forward_and_backward_is_refused(
    devices: DeviceSet, engines: Engines
) -> None:
    """As torch refuses it for what its graph has saved."""
    engine = engines(make_mlp(), devices)
    output = engine(*BATCHES[0].args)
    in_place(engine.model[0].weight, torch.zeros(MLP_WIDTH, MLP_WIDTH))
    with pytest.raises(RuntimeError, match="weights were written"):
        output.sum().backward()


# Memory that is used again.


@pytest.mark.parametrize("pin_model", ["off", "alloc"])
@pytest.mark.parametrize("name", [FROZEN, SMALL, LARGE_BUFFER, TRAINED])
def test_memory_that_takes_the_place_of_what_was_there_is_not_taken_for_it(
    name: str, pin_model: str, engines: Engines
) -> None:
    """Memory that was let go of is what the allocator gives out next."""
    model, plain = make_stateful(), make_stateful()
    engine = engines(model, max_gpu_memory=ROOM_GB, pin_model=pin_model)
    addresses = set()
    for number in range(6):
        run = run_batch(engine, BATCHES[0], 1)
        expected = plain_call(plain, BATCHES[0].whole(), BATCHES[0].loss_fn)
        ONE.check(run.detach(), expected.loss)
        engine.synchronize()
        for part in (model, plain):
            tensor = tensor_of(part, name)
            shape = tensor.shape
            tensor.data = torch.empty(0)
            tensor.data = torch.full(shape, 1.0 + number)
        addresses.add(tensor_of(model, name).data_ptr())
    assert len(addresses) > 1


# Precision.


def test_a_load_makes_masters_what_is_loaded_to_the_bit(
    devices: DeviceSet, engines: Engines
) -> None:
    """Also where bf16 weights were what is loaded before, by masters that only round to it."""
    for load in (RoundPipe.load_state_dict, None):
        pair = Pair(engines, devices, dtype=torch.bfloat16, lr=1e-5)
        start = {name: value.clone() for name, value in pair.model.state_dict().items()}
        pair.train()
        engine, masters = pair.engine, dict(pair.engine.optim_named_parameters())
        pair.flush()
        same = [name for name in masters if torch.equal(tensor_of(pair.model, name), start[name])]
        assert any(not torch.equal(masters[name], start[name].float()) for name in same), (
            "no master that rounds to what it was"
        )
        if load is None:
            pair.model.load_state_dict(start)
            engine.reload_parameters()
        else:
            load(engine, start)
        pair.check(
            {name: master.detach().clone() for name, master in masters.items()},
            {name: start[name].float() for name in masters},
        )
        assert all(torch.equal(master, start[name].float()) for name, master in masters.items())


def test_what_is_exchanged_for_an_evaluation_and_put_back_leaves_masters_as_they_are(
    devices: DeviceSet, engines: Engines
) -> None:
    """As averaged weights are. So do the elements that a mask leaves of a weight."""
    pair = Pair(engines, devices, dtype=torch.bfloat16, lr=1e-3)
    pair.train()
    pair.flush()
    before = {name: m.detach().clone() for name, m in pair.engine.optim_named_parameters()}
    kept = weights_of(pair.model)
    for name in kept:
        in_place(tensor_of(pair.model, name), kept[name] * 2)
    plain, inputs = copy.deepcopy(pair.model), BATCHES[0].args[0].bfloat16()
    with torch.no_grad():
        one = RoundPipeRunConfig(num_microbatch=1)
        pair.check(pair.engine(inputs, roundpipe_run_config=one), plain(inputs))
    for name, value in kept.items():
        in_place(tensor_of(pair.model, name), value)
    in_place(tensor_of(pair.model, "0.weight")[0], torch.zeros(MLP_WIDTH))
    after = dict(pair.engine.optim_named_parameters())
    before["0.weight"][0] = 0.0
    assert all(torch.equal(after[name], before[name]) for name in before)


# What a forward writes.


class Renormalised(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight))
        return super().forward(hidden)


class Clamped(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.01, 0.01)
        return super().forward(hidden)


class Moved(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data = self.weight.data / 2
        return super().forward(hidden)


class Exchanged(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight.detach() / 2)
        return super().forward(hidden)


@pytest.mark.parametrize(
    ("kind", "is_tied"),
    [(Renormalised, True), *((k, False) for k in (Renormalised, Clamped, Moved, Exchanged))],
)
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_a_forward_that_writes_to_a_weight_is_refused(
    kind: type[nn.Linear],
    is_tied: bool,
    trains: bool,
    grad: bool,
    devices: DeviceSet,
    engines: Engines,
) -> None:
    model = make_mlp()
    model[2] = kind(MLP_WIDTH, MLP_WIDTH).requires_grad_(trains)
    if is_tied:
        model[4].weight = model[2].weight
    before = weights_of(model)
    engine = engines(model, devices)
    what = f"{kind.__name__}.forward .* its {'trained' if trains else 'frozen'} parameter 'weight'"
    with pytest.raises(ConfigError, match=what), torch.no_grad():
        run_batch(engine, BATCHES[0], 2) if grad else engine(*BATCHES[0].args)
    devices.check(engine_weights(engine), before)


class Embedded(nn.Module):
    """Of which the first inputs need no limit."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(8, MLP_WIDTH, max_norm=1.0)
        with torch.no_grad():
            self.table.weight[:4] *= 0.01
        self.table.requires_grad_(trains)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.table(rows)
        return found


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
def test_an_embedding_that_limits_norms_is_refused_when_it_writes(
    trains: bool, devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Embedded(trains=trains), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    engine = engines(model, devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.0)
    for rows in (torch.arange(4), torch.arange(4)):
        engine.forward_backward((rows,), loss_fn=lambda output, _: output.square().sum())
        engine.step(optimizer.step, is_async=False)
    with pytest.raises(ConfigError, match="Embedding.forward writes .* Set max_norm=None"):
        engine.forward_backward((torch.arange(8),), loss_fn=lambda output, _: output.sum())


class Between(nn.Module):
    """The embedding runs on the host, as it is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, MLP_WIDTH, max_norm=1.0)
        self.first, self.second = (nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(self.table(rows)).tanh())
        return output


@BOTH
def test_what_a_forward_on_the_host_writes_is_carried(is_async: bool, engines: Engines) -> None:
    """Behind an asynchronous step it is refused."""

    def make() -> Between:
        torch.manual_seed(0)
        return Between()

    model, plain = make(), make()
    engine: Any = roundpipe.wrap_model_to_roundpipe(
        model,
        use_sequential_preset=False,
        skip_modules=[model.table],
        lower_threshold=1,
        upper_threshold=1,
        devices=1,
    )
    with engine:
        ours = torch.optim.SGD(engine.optim_parameters(), lr=0.5)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            rows = torch.randint(0, 8, (4, 3), generator=generator)
            if is_async and step == 1:
                with pytest.raises(ConfigError, match="'table.weight' was changed"):  # noqa: PT012
                    engine(rows).square().mean().backward()
                    engine.synchronize()
                return
            engine(rows).square().mean().backward()
            engine.step(ours.step, is_async=is_async)
            plain(rows).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
        engine.synchronize()
        ONE.check(weights_of(model), weights_of(plain), bitwise=False)
