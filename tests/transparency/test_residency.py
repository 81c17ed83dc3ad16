"""Weights that stay on a device between stage runs: they are not sent again, and never are old ones
computed with.

A virtual device keeps nothing unless it is told how much it may hold, so these tests say so.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.autoplan.planner import Planner
from roundpipe.params.working import LayerParameters, ParameterUse
from roundpipe.plan.actions import Pass
from roundpipe.plan.kept_layers import resident_layers
from roundpipe.runtime.loader import StageLoader
from roundpipe.runtime.stage import Stage
from roundpipe.transfer.sender import DirectSender
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import (
    Engines,
    engine_gradients,
    engine_weights,
    reference_steps,
    run_batch,
    train_steps,
)
from tests.support.models import LORA_LLAMA, MLP, make_mlp, mlp_batch
from tests.support.reference import Reference, plain_call

ROOM_GB = 1.0
THREE_STAGES = ModelExecutePlan([range(3), range(3, 5)], [range(5, 7), range(2, 5), range(2)])
BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(4)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Counts the parameters of each layer that went up."""
    counts: Counter[int] = Counter()
    send = DirectSender.send

    def counted(
        self: DirectSender, layer: LayerParameters, uses: Sequence[ParameterUse], *more: Any
    ) -> Any:
        counts[layer.layer] += len(uses)
        return send(self, layer, uses, *more)

    monkeypatch.setattr(DirectSender, "send", counted)
    return counts


def frozen_but_the_last() -> nn.Sequential:
    model = make_mlp()
    for layer in model[:-1]:
        layer.requires_grad_(requires_grad=False)
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def test_frozen_weights_go_up_once(sent: Counter[int], engines: Engines) -> None:
    engine = engines(frozen_but_the_last(), max_gpu_memory=ROOM_GB)
    optimizer = torch.optim.SGD(
        engine.optim_parameters(), lr=0.05
    )  # whose updates are made on the host
    train_steps(engine, optimizer, BATCHES, 2, is_async=False)
    assert [sent[layer] for layer in (0, 2, 4)] == [2, 2, 2]
    assert sent[6] == 2 * len(BATCHES)


def test_one_call_sends_a_layer_once_to_a_device_for_all_its_stage_runs(
    sent: Counter[int], engines: Engines
) -> None:
    engine = engines(make_mlp(), max_gpu_memory=ROOM_GB)
    run_batch(engine, BATCHES[0], 2, execute_plan=THREE_STAGES)
    engine.synchronize()
    assert [sent[layer] for layer in (0, 2, 4, 6)] == [2, 2, 2, 2]


def test_outputs_take_the_room_only_of_calls_that_return_them(
    sent: Counter[int], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation's logits are no reason to send frozen weights to training's calls again."""
    note_outputs = Planner.note_outputs
    monkeypatch.setattr(
        Planner, "note_outputs", lambda self, num_bytes: note_outputs(self, 10**9 * num_bytes)
    )
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=THREE_STAGES)
    engine = engines(frozen_but_the_last(), max_gpu_memory=ROOM_GB, model_run_config=config)
    for _ in range(3):  # until it is known what there is room for
        run_batch(engine, BATCHES[0], 2)
        with torch.no_grad():
            engine(*BATCHES[0].args)
    run_batch(engine, BATCHES[0], 2)
    sent.clear()
    run_batch(engine, BATCHES[0], 2)
    assert [sent[layer] for layer in (0, 2, 4)] == [0, 0, 0]
    with torch.no_grad():
        engine(*BATCHES[0].args)
        sent.clear()
        engine(*BATCHES[0].args)
    assert [sent[layer] for layer in (0, 2, 4)] == [2, 2, 2]


def test_without_room_every_stage_run_sends_its_layers(
    sent: Counter[int], engines: Engines
) -> None:
    engine = engines(make_mlp())
    run_batch(engine, BATCHES[0], 2, execute_plan=THREE_STAGES)
    engine.synchronize()
    assert [sent[layer] for layer in (0, 2, 4, 6)] == [4, 4, 4, 2]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("plan", [None, THREE_STAGES], ids=["planned", "three stages"])
@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
def test_training_is_the_same_as_without(
    devices: DeviceSet, plan: ModelExecutePlan | None, is_async: bool, engines: Engines
) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    model = MLP.make()
    reference = Reference(model, sgd, staleness=int(is_async))
    expected = reference_steps(reference, BATCHES, 2)
    engine = engines(model, devices, max_gpu_memory=ROOM_GB, model_run_config=config)
    losses = train_steps(engine, sgd(engine.optim_parameters()), BATCHES, 2, is_async=is_async)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)


def scale_in_place(engine: RoundPipe) -> None:
    with torch.no_grad():
        engine.model[0].weight.mul_(2)


def scale_data_and_reload(engine: RoundPipe) -> None:
    engine.model[0].weight.data.mul_(2)
    engine.reload_parameters()


def load_scaled(engine: RoundPipe) -> None:
    engine.load_state_dict({name: 2 * value for name, value in engine.state_dict().items()})


def replace_data(engine: RoundPipe) -> None:
    engine.model[0].weight.data = 2 * engine.model[0].weight.data


@pytest.mark.parametrize(
    "change", [scale_in_place, scale_data_and_reload, load_scaled, replace_data]
)
def test_changed_frozen_weights_go_up_again(change: Any, engines: Engines) -> None:
    engine = engines(frozen_but_the_last(), max_gpu_memory=ROOM_GB)
    run_batch(engine, BATCHES[0], 2)
    engine.zero_grad()
    change(engine)
    loss = run_batch(engine, BATCHES[0], 2)
    expected = plain_call(engine.model, BATCHES[0].split(2), BATCHES[0].loss_fn)
    ONE.check(loss, expected.loss)
    ONE.check(engine_gradients(engine), expected.gradients)


def test_weights_frozen_and_trained_in_turn_are_the_newest(engines: Engines) -> None:
    model = make_mlp()
    engine = engines(model, max_gpu_memory=ROOM_GB)
    optimizer = sgd(engine.optim_parameters())
    for batch, trains in zip(BATCHES, [True, False, True, False], strict=True):
        model[0].requires_grad_(trains)
        expected = plain_call(model, batch.split(2), batch.loss_fn)
        ONE.check(run_batch(engine, batch, 2), expected.loss)
        engine.step(optimizer.step, is_async=False)
        engine.synchronize()


def test_an_update_on_its_way_to_a_weight_frozen_meanwhile_arrives(engines: Engines) -> None:
    model = make_mlp()
    engine = engines(model, max_gpu_memory=ROOM_GB)
    optimizer = sgd(engine.optim_parameters())
    run_batch(engine, BATCHES[0], 2)
    engine.step(optimizer.step)
    model[0].requires_grad_(requires_grad=False)
    run_batch(engine, BATCHES[1], 2)  # still at the first weights
    engine.zero_grad()
    engine.synchronize()
    expected = plain_call(model, BATCHES[2].split(2), BATCHES[2].loss_fn)
    ONE.check(run_batch(engine, BATCHES[2], 2), expected.loss)


def room_for(count: int) -> Callable[[frozenset[int]], bool]:
    return lambda kept: len(kept) <= count


def test_only_what_there_is_room_for_stays() -> None:
    """Frozen layers first, which save every upload; one that trains and is visited once saves
    none."""
    fused = [(Pass.FORWARD, range(3)), (Pass.FUSED, range(3, 4)), (Pass.BACKWARD, range(1, 3))]
    trained = [0, 0, 10, 10]
    assert resident_layers([fused], [10] * 4, trained, room_for(10)) == {0, 1, 2}
    assert resident_layers([fused], [10] * 4, trained, room_for(2)) == {0, 1}
    assert resident_layers([fused], [10] * 4, trained, room_for(1)) == {1}
    assert resident_layers([fused], [10] * 4, trained, room_for(0)) == set()


def test_what_saves_less_stays_if_only_that_fits() -> None:
    passes = [(Pass.FORWARD, range(2)), (Pass.FUSED, range(2, 4)), (Pass.BACKWARD, range(2))]
    assert resident_layers([passes], [10] * 4, [0] * 4, lambda kept: kept.isdisjoint({0, 1})) == {
        2,
        3,
    }


def test_what_stays_depends_on_what_trains_now(engines: Engines) -> None:
    """Asked before anything was measured, and so at the same state of the measurements."""
    engine = engines(make_mlp(), max_gpu_memory=ROOM_GB)
    rounds = [[(Pass.FUSED, range(7))]]
    assert (
        engine._runner.memory.resident_layers(engine.planner.plan("fused", 2, None), rounds)
        == set()
    )
    engine.model[0].requires_grad_(requires_grad=False)
    assert engine._runner.memory.resident_layers(engine.planner.plan("fused", 2, None), rounds) == {
        0
    }


def test_one_stage_run_keeps_what_is_partly_frozen() -> None:
    """Its slots are held anyway; but one that is filled anew by every call had better go round."""
    assert resident_layers([[(Pass.FUSED, range(4))]], [10] * 4, [0, 1, 10, 10], room_for(0)) == {
        0,
        1,
    }


def test_after_a_failure_nothing_is_taken_for_granted(sent: Counter[int], engines: Engines) -> None:
    engine = engines(frozen_but_the_last(), max_gpu_memory=ROOM_GB)
    run_batch(engine, BATCHES[0], 2)
    before = sent[0]
    failing = BATCHES[0]._replace(loss_fn=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_batch(engine, failing, 2)
    run_batch(engine, BATCHES[0], 2)
    assert sent[0] == 2 * before


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_microbatch", [1, 3])
@pytest.mark.parametrize("make", [make_mlp, frozen_but_the_last, LORA_LLAMA.make])
def test_every_layer_in_a_backward_is_done_before_its_stage_run_is_over(
    make: Any, num_microbatch: int, grain: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next call's first weights would wait for the whole stage run."""
    done: set[int] = set()
    release = StageLoader.release

    def noted(self: StageLoader, stage: Stage) -> None:
        done.update(
            layer for layer, departure in stage.departures.items() if departure.free is not None
        )
        release(self, stage)

    monkeypatch.setattr(StageLoader, "release", noted)
    model = make()
    engine = engines(model)
    batch = mlp_batch(6) if isinstance(model, nn.Sequential) else LORA_LLAMA.batch(6, 0)
    num_layers = len(engine.execute_plan.bwd_plan[0]) if engine.execute_plan else 0
    run_batch(engine, batch, num_microbatch, recompute_grain=grain)
    engine.synchronize()
    first = 0 if make is make_mlp else num_layers - 1 if make is frozen_but_the_last else 1
    assert done == set(range(first, num_layers))


@pytest.mark.parametrize("seed", range(3))
def test_kept_slots_are_waited_for(seed: int, engines: Engines) -> None:
    """Late copies and poisoned slots: what a lane reads too early is not a number."""
    adversaries = Adversaries(2, seed, num_bytes=1 << 30)
    model = LORA_LLAMA.make()
    batches = [LORA_LLAMA.batch(6, number) for number in range(4)]
    reference = Reference(model, sgd, staleness=1)
    expected = reference_steps(reference, batches, 3)
    engine = engines(model, adversaries)
    losses = train_steps(engine, sgd(engine.optim_parameters()), batches, 3, is_async=True)
    TWO.check(torch.stack(losses), torch.stack(expected))
    TWO.check(engine_weights(engine), reference.weights)
    assert adversaries.faults == []
