"""Same numbers on any machine: devices, execution plan and recompute grain change nothing, to the
bit on the CPU."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE, TWO, VIRTUAL, DeviceSet
from tests.support.engines import Engines, engine_gradients, engine_weights, run_batch, train_steps
from tests.support.models import CASES, MLP_WIDTH, Batch, ModelCase, mlp_batch
from tests.support.reference import plain_call

GRAINS = ["stage", "layer"]
MICROBATCHES = 4
BATCH = mlp_batch(
    rows=10, seed=1
)  # 10 rows in 4 microbatches: an uneven split is the same one everywhere


def make_mixed(dropout: float) -> nn.Sequential:
    """What a plan could get wrong: a weight used by two layers, a frozen layer, dropout, layers
    without weights."""
    torch.manual_seed(3)
    shared = nn.Linear(MLP_WIDTH, MLP_WIDTH)
    frozen = nn.Linear(MLP_WIDTH, MLP_WIDTH).requires_grad_(False)
    return nn.Sequential(
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
        nn.Dropout(dropout),
        shared,
        nn.Tanh(),
        frozen,
        nn.Sequential(nn.LayerNorm(MLP_WIDTH), nn.Dropout(dropout)),
        shared,
        nn.Dropout(dropout),
        nn.Linear(MLP_WIDTH, MLP_WIDTH),
    )


NUM_LAYERS = len(make_mixed(0.0))


def cut(draws: random.Random, start: int, stop: int) -> list[range]:
    """A random partition of [start, stop) into consecutive ranges, ascending."""
    if start == stop:
        return []
    inner = sorted(draws.sample(range(start + 1, stop), draws.randint(0, stop - start - 1)))
    borders = [start, *inner, stop]
    return [range(first, last) for first, last in itertools.pairwise(borders)]


def random_fused_plan(draws: random.Random, num_layers: int) -> ModelExecutePlan:
    """Forward stages up to the fused stage, which is the first backward stage; backward stages
    complete."""
    fused_start = draws.randint(0, num_layers - 1)
    backward = [range(fused_start, num_layers), *reversed(cut(draws, 0, fused_start))]
    return ModelExecutePlan(fwd_plan=cut(draws, 0, fused_start), bwd_plan=backward)


def random_train_plan(draws: random.Random, num_layers: int) -> ModelExecutePlan:
    """Both directions complete, cut independently: what `forward` and a later `backward` run."""
    return ModelExecutePlan(
        fwd_plan=cut(draws, 0, num_layers), bwd_plan=list(reversed(cut(draws, 0, num_layers)))
    )


def seeded_call(
    engine: RoundPipe, batch: Batch, **settings: object
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one call that starts from a given seed and no gradients."""
    torch.manual_seed(42)
    engine.zero_grad()
    loss = run_batch(engine, batch, MICROBATCHES, **settings)
    return loss, engine_gradients(engine)


def forward_with(engine: RoundPipe, batch: Batch, **settings: object) -> torch.Tensor:
    return engine.forward(
        *batch.args, roundpipe_run_config=RoundPipeRunConfig(**settings), **batch.kwargs
    )


def check_random_plans(engines: Engines, devices: DeviceSet, dropout: float, seeds: range) -> None:
    baseline_engine = engines(make_mixed(dropout), DeviceSet(kind=devices.kind, count=1))
    baseline = seeded_call(baseline_engine, BATCH)
    engine = engines(make_mixed(dropout), devices)
    for seed in seeds:
        draws = random.Random(seed)
        plan, grain = random_fused_plan(draws, NUM_LAYERS), draws.choice(GRAINS)
        try:
            loss, gradients = seeded_call(engine, BATCH, execute_plan=plan, recompute_grain=grain)
            devices.check(loss, baseline[0])
            devices.check(gradients, baseline[1])
        except BaseException as error:
            error.add_note(f"plan of seed {seed}: {plan.fwd_plan} / {plan.bwd_plan}, grain {grain}")
            raise


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_random_fused_plans_and_grains_give_the_same_bits(
    dropout: float, devices: DeviceSet, engines: Engines
) -> None:
    check_random_plans(engines, devices, dropout, range(15))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_two_hundred_random_plans(dropout: float, devices: DeviceSet, engines: Engines) -> None:
    check_random_plans(engines, devices, dropout, range(100, 300))


def test_the_common_numbers_are_those_of_the_plain_loop(
    devices: DeviceSet, engines: Engines
) -> None:
    """Agreeing with each other is not enough."""
    model = make_mixed(0.0)
    expected = plain_call(
        copy.deepcopy(model),
        mlp_batch(rows=12).split(MICROBATCHES),
        mlp_batch(rows=12).loss_fn,
    )
    engine = engines(model, devices)
    draws = random.Random(0)
    for _ in range(5):
        loss, gradients = seeded_call(
            engine, mlp_batch(rows=12), execute_plan=random_fused_plan(draws, NUM_LAYERS)
        )
        devices.check(loss, expected.loss)
        devices.check(gradients, expected.gradients, bitwise=False)  # the shared weight


@pytest.mark.parametrize("grain", GRAINS)
def test_forward_and_backward_apart_give_the_bits_of_the_fused_call(
    grain: str, devices: DeviceSet, engines: Engines
) -> None:
    """`forward()` then `loss.backward()` under random train plans, dropout included.

    The loss is cut as the batch was, so that every microbatch's gradient starts from the same
    numbers.
    """
    engine = engines(make_mixed(0.5), devices)
    batch = mlp_batch(rows=12)
    torch.manual_seed(42)
    run_batch(engine, batch, MICROBATCHES)
    expected = engine_gradients(engine)
    draws = random.Random(5)
    for _ in range(6):
        engine.zero_grad()
        torch.manual_seed(42)
        config = {"num_microbatch": MICROBATCHES, "recompute_grain": grain}
        output = forward_with(
            engine, batch, execute_plan=random_train_plan(draws, NUM_LAYERS), **config
        )
        pieces = zip(output.chunk(MICROBATCHES), batch.label.chunk(MICROBATCHES), strict=True)
        torch.stack([batch.loss_fn(*piece) for piece in pieces]).sum().backward()
        devices.check(engine_gradients(engine), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stage_count_and_device_count_do_not_change_training(
    case: ModelCase, engines: Engines
) -> None:
    """Two steps per machine, weights compared: from one fused stage to one layer per stage, tied
    weights too."""
    batches = [case.batch(5, seed) for seed in range(2)]
    expected = None
    for devices in VIRTUAL:
        for min_stages in (1, 3, 6):
            engine = engines(case.make(), devices)
            plan = ModelExecutePlan.auto("fused", engine, min_stages=min_stages)
            optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1, momentum=0.9)
            for batch in batches:
                run_batch(engine, batch, 3, execute_plan=plan)
                engine.step(optimizer.step, is_async=False)
            weights = engine_weights(engine)
            engine.close()
            expected = expected or weights
            devices.check(weights, expected)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_training_with_dropout_depends_on_the_seed_only(is_async: bool, engines: Engines) -> None:
    batches = [mlp_batch(rows=10, seed=seed) for seed in range(5)]

    def train(devices: DeviceSet, seed: int) -> dict[str, torch.Tensor]:
        engine = engines(make_mixed(0.5), devices)
        torch.manual_seed(seed)
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.01, momentum=0.9)
        train_steps(engine, optimizer, batches, 3, is_async=is_async)
        return engine_weights(engine)

    expected = train(ONE, 0)
    assert all(torch.isfinite(weight).all() for weight in expected.values()), (
        "diverged: nothing can be compared"
    )
    for devices in (TWO, THREE, ONE):
        devices.check(train(devices, 0), expected)
    assert not torch.equal(train(ONE, 1)["0.weight"], expected["0.weight"]), (
        "the seed changed nothing: no dropout ran"
    )
