"""What a layer's forward writes to its module beside weights was lost: statistics stood still,
caches never went back.

Batch norm writes its statistics silently, so the engine compares values to see whether a layer
does. It did so for the first batch only: with one of zeros, as a warm-up is, the running mean
stayed at zero for good. And of a module that sets a plain attribute beside its buffer, as rotary
embeddings of growing length do, only the buffer was written back. If the very first call failed
after it had silently written a device's copy of a buffer, the next one started from that.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ConfigError, ModelExecutePlan, RoundPipeRunConfig
from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, Batch, mlp_batch
from tests.support.reference import buffers_of, plain_call

ONE_LAYER_EACH = ModelExecutePlan(
    fwd_plan=[range(1), range(1, 2)], bwd_plan=[range(2, 3), range(1, 2), range(1)]
)
WHOLE = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(3)])
PLANS = pytest.mark.parametrize("plan", [ONE_LAYER_EACH, WHOLE], ids=["staged", "fused"])


def batch_of(factor: float, seed: int = 0) -> Batch:
    batch = mlp_batch(rows=6, seed=seed)
    return batch._replace(args=(batch.args[0] * factor,))


@PLANS
@pytest.mark.parametrize("num_zeros", [1, 2])
def test_statistics_after_first_batches_of_zeros(
    num_zeros: int, plan: ModelExecutePlan, devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Tanh())
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for number in range(num_zeros + 3):
        batch = batch_of(0.0 if number < num_zeros else 1.0, seed=number)
        expected = plain_call(plain, batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2, execute_plan=plan)
        devices.check(engine_gradients(engine), expected.gradients)
        devices.check(buffers_of(model), buffers_of(plain))
        engine.zero_grad()
    assert bool((model[0].running_mean != 0).all())


@pytest.mark.parametrize(
    "plan", [ONE_LAYER_EACH, WHOLE, None], ids=["staged", "fused", "evaluation"]
)
def test_statistics_after_the_first_call_failed(
    plan: ModelExecutePlan | None, devices: DeviceSet, engines: Engines
) -> None:
    """Nobody has compared values by then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Tanh())
    plain, batch = copy.deepcopy(model), batch_of(1.0)
    engine = engines(model, devices)

    def fails(outputs: Tensor, label: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")

    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    call = engine.forward_loss if plan is None else engine.forward_backward
    with pytest.raises(ArithmeticError):
        call(batch.args, label=batch.label, loss_fn=fails, run_config=config)
    plain_call(plain, batch.split(2), batch.loss_fn)
    run_batch(engine, batch, 2, execute_plan=plan)
    devices.check(buffers_of(model), buffers_of(plain))


def test_statistics_after_an_evaluation_came_first(devices: DeviceSet, engines: Engines) -> None:
    """A check of the untrained model writes nothing, and must not be taken for what training
    does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.BatchNorm1d(MLP_WIDTH), nn.Tanh())
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    engine.eval()
    with torch.no_grad():
        engine(*batch_of(1.0).args)
    engine.train()
    for seed in range(2):
        batch = batch_of(1.0, seed)
        plain_call(plain, batch.split(2), batch.loss_fn)
        run_batch(engine, batch, 2, execute_plan=ONE_LAYER_EACH)
        engine.synchronize()
        devices.check(buffers_of(model), buffers_of(plain))


class Growing(nn.Module):
    """Recomputes its frequencies for inputs larger than seen, and goes back for small ones: it
    remembers how large."""

    frequencies: Tensor
    original: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(1.0, 2.0, MLP_WIDTH))
        self.register_buffer("original", self.frequencies.clone())
        self.weight = nn.Parameter(torch.ones(MLP_WIDTH))
        self.largest = 4.0
        self.seen = "nothing"

    def forward(self, hidden: Tensor) -> Tensor:
        size = float(hidden.detach().abs().max())
        if size > self.largest:
            self.frequencies = self.original / size
            self.largest = size
            self.seen = "something large"
        elif size < 4.0 and self.largest > 4.0:
            self.frequencies = self.original.clone()
            self.largest = 4.0
        return hidden * self.frequencies * self.weight


@pytest.mark.parametrize(
    "is_whole_model", [False, True], ids=["layer of a sequence", "whole model"]
)
def test_plain_attributes_that_a_forward_sets_are_there_afterwards(
    is_whole_model: bool, devices: DeviceSet, engines: Engines
) -> None:
    model = Growing() if is_whole_model else nn.Sequential(nn.Flatten(), Growing(), nn.Tanh())
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    with torch.no_grad():
        for factor in (0.1, 100.0, 10.0, 0.1, 0.1, 100.0):
            inputs = torch.linspace(-1.0, 1.0, 12 * MLP_WIDTH).view(12, MLP_WIDTH) * factor
            devices.check(
                engine(inputs), torch.cat([plain(part) for part in inputs.chunk(devices.count + 1)])
            )
            devices.check(buffers_of(model), buffers_of(plain))
    ours, theirs = (network if is_whole_model else network[1] for network in (model, plain))
    assert (ours.largest, ours.seen) == (theirs.largest, theirs.seen)
    assert theirs.seen == "something large"


@PLANS
def test_plain_attributes_set_in_training(
    plan: ModelExecutePlan, devices: DeviceSet, engines: Engines
) -> None:
    """One microbatch, as layers may remember the last one. The attribute must not be set again by
    the recompute."""
    model = nn.Sequential(nn.Flatten(), Growing(), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for factor in (0.1, 100.0, 0.1):
        batch = batch_of(factor)
        expected = plain_call(plain, batch.whole(), batch.loss_fn)
        devices.check(run_batch(engine, batch, 1, execute_plan=plan), expected.loss)
        engine.synchronize()
        devices.check(buffers_of(model), buffers_of(plain))
        assert (model[1].largest, model[1].seen) == (plain[1].largest, plain[1].seen)
        engine.zero_grad()


def test_a_batch_norm_shared_by_two_layers_is_refused(engines: Engines) -> None:
    """Each layer works on a copy of its buffers, so one of the two updates would be lost."""
    norm = nn.BatchNorm1d(MLP_WIDTH)
    model = nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH), norm, nn.Linear(MLP_WIDTH, MLP_WIDTH), norm
    )
    engine = engines(model, TWO)
    with pytest.raises(ConfigError, match="running_mean|num_batches_tracked"):
        run_batch(engine, mlp_batch(rows=6), 2)
    assert int(norm.num_batches_tracked) == 0


class Recurring(nn.Module):
    """Remembers in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.last: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.note = hidden.detach()  # nobody asks for it before the next forward sets it again
        if self.last is not None:
            hidden = hidden + self.last
        self.last = hidden.detach().mean(0)
        output: torch.Tensor = self.linear(hidden)
        return output


def test_a_tensor_that_the_next_call_will_not_see_is_spoken_of(engines: Engines) -> None:
    engine = engines(nn.Sequential(Recurring(), nn.Linear(MLP_WIDTH, MLP_WIDTH)))
    batch = mlp_batch(rows=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run_batch(engine, batch, 2)
            engine.synchronize()
    told = [str(warning.message) for warning in caught if "will not see" in str(warning.message)]
    assert len(told) == 1
    assert "'last'" in told[0]
