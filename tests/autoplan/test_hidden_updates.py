"""Whether updates hide behind the rounds beside which they run: what decides if layers are worth a
device state."""

import random
from dataclasses import replace

import pytest
from torch import nn

from roundpipe.autoplan import planner as planning
from roundpipe.autoplan.planned import Planned
from roundpipe.autoplan.planner import Planner
from roundpipe.device.virtual import VirtualDevice
from roundpipe.memory.pinning import HostMemory
from roundpipe.params.working import ParameterStore
from roundpipe.plan.best import step_ms

LAYERS = 4


def make_planner() -> Planner:
    layers = [nn.Linear(16, 16) for _ in range(LAYERS)]
    store = ParameterStore(layers, HostMemory("off", accelerated=False))
    return Planner(store, [VirtualDevice(0, 1_000_000)], layers=layers)


def measured_call(planner: Planner, layer_ms: float) -> Planned:
    """A call whose graphs are known, as its layers turn out to take so long."""
    for _ in range(2):
        planned = planner.plan("fused", 2, None)
        for layer in range(LAYERS + 1):
            planned.measured.record_saved_bytes(layer, 1000)
        planner.reconsider()
    for _ in range(20):
        for layer in range(LAYERS):
            planned.measured.record_time("forward", layer, layer_ms)
            planned.measured.record_time("backward", layer, layer_ms)
    return planner.plan("fused", 2, None)


def test_an_update_hides_as_long_as_it_is_shorter_than_the_round() -> None:
    """Both may change; as long as nobody knows how long updates take, they are believed to."""
    planner = make_planner()
    planned = measured_call(planner, layer_ms=1.0)
    assert planner.hides_update(planned)
    for _ in range(20):
        planner.rates.record_update(1.0)
    assert planner.hides_update(planned)
    for _ in range(20):
        planner.rates.record_update(1000.0)
    assert not planner.hides_update(planned)
    assert planner.hides_update(measured_call(planner, layer_ms=1000.0))
    planner.note_step(is_async=False)
    assert not planner.hides_update(measured_call(planner, layer_ms=1000.0)), (
        "nothing runs beside it"
    )


@pytest.mark.parametrize("hiccups", range(5))
def test_hiccups_of_the_machine_do_not_make_updates_longer_than_rounds(hiccups: int) -> None:
    """Once would be enough: device states that are taken are kept. Updates take as long as a round
    here, but some take three times that, at any time and the first ones above all."""
    planner = make_planner()
    planned = measured_call(planner, layer_ms=1.0)
    costs, workload = planner.problem_of(planned)
    round_ms = step_ms(planned.plan, "fused", costs, replace(workload, optimizer_ms=0.0))
    draws = random.Random(hiccups)
    for number in range(100):
        is_slow = number < 3 or draws.random() < 0.3
        planner.rates.record_update(round_ms * (3.0 if is_slow else 0.95 + 0.1 * draws.random()))
        assert planner.hides_update(planned), number
    for _ in range(8):
        planner.rates.record_update(1.5 * round_ms)
    assert not planner.hides_update(planned)


def test_a_round_is_predicted_once_while_nothing_new_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner, predicted = make_planner(), []
    planned = measured_call(planner, layer_ms=1.0)
    for _ in range(20):
        planner.rates.record_update(1.0)
    monkeypatch.setattr(
        planning, "step_ms", lambda *given: predicted.append(given) or step_ms(*given)
    )
    for _ in range(3):
        planner.hides_update(planned)
    assert len(predicted) == 1
    planned.measured.record_time("forward", 0, 1.5)
    planner.hides_update(planned)
    assert len(predicted) == 2
