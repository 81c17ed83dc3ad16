"""Stages visited in shares: several devices run one stage at a time, each for some of the
microbatches.

A sum of fp32 numbers depends on how it is grouped, so gradients are those of a loop that adds up
each share by itself and then the shares, in the order of microbatches; to the bit, and whatever the
number of devices. Losses, outputs and masks are those of any other plan.
"""

import copy
import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.errors import ConfigError
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, VIRTUAL, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch
from tests.support.models import MLP_WIDTH, Batch, make_mlp, mlp_batch
from tests.support.reference import Tensors, plain_call, weights_of

NUM_LAYERS, MICROBATCHES, ROWS = 7, 5, 15
IN_TWO = ModelExecutePlan(
    fwd_plan=[stage for stage in (range(3), range(3, 5)) for _ in range(2)],
    bwd_plan=[stage for stage in (range(5, 7), range(2, 5), range(2)) for _ in range(2)],
)


def shares_of(count: int) -> list[range]:
    """Five microbatches: the larger shares come first."""
    return {1: [range(5)], 2: [range(3), range(3, 5)], 3: [range(2), range(2, 4), range(4, 5)]}[
        count
    ]


def grouped_gradients(
    model: nn.Sequential, batches: Sequence[Batch], counts: Sequence[int]
) -> Tensors:
    """``counts``: in how many shares each layer has its backward. Calls add up share by share."""
    calls = [
        [
            plain_call(copy.deepcopy(model), [part], batch.loss_fn).gradients
            for part in batch.split(MICROBATCHES)
        ]
        for batch in batches
    ]
    gradients = {}
    for name, _ in model.named_parameters():
        shares = [
            ordered_sum([ordered_sum([call[m][name] for m in share]) for call in calls])
            for share in shares_of(counts[int(name.split(".")[0])])
        ]
        gradients[name] = ordered_sum(shares)
    return gradients


def ordered_sum(values: Sequence[Tensor]) -> Tensor:
    return list(itertools.accumulate(values))[-1]


def counts_of(plan: ModelExecutePlan) -> list[int]:
    return [sum(layer in stage for stage in plan.bwd_plan) for layer in range(NUM_LAYERS)]


def random_shared_plan(draws: random.Random) -> ModelExecutePlan:
    """Every stage in one to three shares, for itself."""

    def cut(stop: int) -> list[range]:
        borders = [
            0,
            *sorted(draws.sample(range(1, stop), draws.randint(0, stop - 1)) if stop else []),
            stop,
        ]
        stages = [range(a, b) for a, b in itertools.pairwise(borders) if a < b]
        return [stage for stage in stages for _ in range(draws.randint(1, 3))]

    fused = draws.randint(0, NUM_LAYERS - 1)
    fused_shares = [range(fused, NUM_LAYERS)] * draws.randint(1, 3)
    return ModelExecutePlan(cut(fused), [*fused_shares, *reversed(cut(fused))])


def check_random_plans(engines: Engines, devices: DeviceSet, seeds: range) -> None:
    model, batch = make_mlp(), mlp_batch(ROWS)
    engine, plain = (
        engines(make_mlp(), devices),
        plain_call(make_mlp(), batch.split(MICROBATCHES), batch.loss_fn),
    )
    for seed in seeds:
        draws = random.Random(seed)
        plan, grain = random_shared_plan(draws), draws.choice(["stage", "layer"])
        engine.zero_grad()
        loss = run_batch(engine, batch, MICROBATCHES, execute_plan=plan, recompute_grain=grain)
        expected = grouped_gradients(model, [batch], counts_of(plan))
        try:
            ONE.check(loss, plain.loss)
            ONE.check(engine_gradients(engine), expected)
        except AssertionError as error:
            error.add_note(f"seed {seed}: {plan!r}, grain {grain}")
            raise


@pytest.mark.parametrize("devices", VIRTUAL, ids=str)
def test_random_shared_plans_sum_share_by_share(devices: DeviceSet, engines: Engines) -> None:
    check_random_plans(engines, devices, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("devices", VIRTUAL, ids=str)
def test_two_hundred_random_shared_plans(devices: DeviceSet, engines: Engines) -> None:
    check_random_plans(engines, devices, range(100, 300))


def test_the_grouping_shows() -> None:
    """Else the tests above could not fail."""
    batch = mlp_batch(ROWS)
    whole, in_two = (
        grouped_gradients(make_mlp(), [batch], [count] * NUM_LAYERS) for count in (1, 2)
    )
    assert any(not torch.equal(whole[name], in_two[name]) for name in whole)


@pytest.mark.parametrize("devices", VIRTUAL, ids=str)
def test_calls_add_up_share_by_share_until_the_step(devices: DeviceSet, engines: Engines) -> None:
    model = make_mlp()
    batches = [mlp_batch(ROWS, seed) for seed in range(2)]
    gradients = grouped_gradients(model, batches, [2] * NUM_LAYERS)
    engine = engines(copy.deepcopy(model), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for batch in batches:
        run_batch(engine, batch, MICROBATCHES, execute_plan=IN_TWO)
    engine.step(optimizer.step, is_async=False)
    expected = {name: weight - 0.1 * gradients[name] for name, weight in weights_of(model).items()}
    devices.check(engine_weights(engine), expected, bitwise=False)
    ONE.check(engine_gradients(engine), {})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_wait_is_there_on_devices_that_copy_late(count: int) -> None:
    """Forward and backward apart too, where a stage run's inputs were kept on another device."""
    model, batch = make_mlp(), mlp_batch(ROWS)
    expected = grouped_gradients(model, [batch], [2] * NUM_LAYERS)
    for is_apart in (False, True):
        devices, engines = Adversaries(count, seed=count), Engines()
        engine = engines(make_mlp(), devices)  # type: ignore[arg-type]
        if is_apart:
            config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=IN_TWO)
            outputs = engine(*batch.args, roundpipe_run_config=config)
            pieces = zip(outputs.chunk(MICROBATCHES), batch.label.chunk(MICROBATCHES), strict=True)
            torch.stack([batch.loss_fn(*piece) for piece in pieces]).sum().backward()
        else:
            run_batch(engine, batch, MICROBATCHES, execute_plan=IN_TWO)
        ONE.check(engine_gradients(engine), expected)
        engines.close()
        assert devices.faults == []


def test_masks_are_those_of_any_other_plan(engines: Engines) -> None:
    def outputs(plan: ModelExecutePlan | None) -> Tensor:
        torch.manual_seed(0)
        layers = [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Dropout(0.5), nn.Linear(MLP_WIDTH, MLP_WIDTH)]
        engine = engines(nn.Sequential(*layers), VIRTUAL[1])
        config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
        made: Tensor = engine(*mlp_batch(ROWS).args, roundpipe_run_config=config)
        return made

    in_three = ModelExecutePlan([range(3)] * 3, [range(3)] * 3)
    ONE.check(outputs(in_three), outputs(ModelExecutePlan([range(3)], [range(3)])))


def test_more_shares_than_microbatches_are_fewer_shares(engines: Engines) -> None:
    batch = mlp_batch(4)
    engine = engines(make_mlp(), VIRTUAL[1])
    loss = run_batch(engine, batch, 2, execute_plan=ModelExecutePlan([], [range(NUM_LAYERS)] * 5))
    expected = plain_call(make_mlp(), batch.split(2), batch.loss_fn)
    ONE.check(loss, expected.loss)
    ONE.check(engine_gradients(engine), expected.gradients)


def test_a_buffer_that_shares_would_write_past_each_other_is_refused(engines: Engines) -> None:
    """Batch statistics of the second share would not contain those of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.BatchNorm1d(MLP_WIDTH))
    engine, batch = engines(model, VIRTUAL[1]), mlp_batch(ROWS)
    before = model[1].running_mean.clone()
    with pytest.raises(ConfigError, match="BatchNorm1d writes its buffer .* in shares"):
        run_batch(engine, batch, MICROBATCHES, execute_plan=ModelExecutePlan([], [range(2)] * 2))
    ONE.check(model[1].running_mean, before)
    run_batch(engine, batch, MICROBATCHES, execute_plan=ModelExecutePlan([], [range(2)]))


class Remembering(nn.Module):
    """Sets a plain attribute where it sees something large, and goes by it from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.largest = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        self.largest = max(self.largest, float(hidden.detach().abs().max()))
        return hidden * self.scale / self.largest


def test_an_attribute_that_one_share_sets_is_refused(engines: Engines) -> None:
    """The second share would not have seen how large the first one's rows are."""
    model = nn.Sequential(nn.Identity(), Remembering())
    engine = engines(model, VIRTUAL[1])
    shares = RoundPipeRunConfig(
        num_microbatch=2, execute_plan=ModelExecutePlan([range(2)] * 2, [range(2)] * 2)
    )
    rows = torch.linspace(5.0, 0.1, 4)[:, None]
    with torch.no_grad():
        with pytest.raises(ConfigError, match="Remembering writes its attribute 'largest'"):
            engine(rows, roundpipe_run_config=shares)
        assert model[1].largest == 1.0
        ONE.check(engine(rows), torch.cat([rows[:2] / 5, rows[2:] / 5]))
