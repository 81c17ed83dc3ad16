"""Layers whose forward is not repeatable tell their recompute what it must not find out anew.

The layer here sends each row to the expert that a counter of its own names, which goes on with
every run: a recompute that routed again would send rows to other experts than the forward did. The
plain model is the oracle, and so is the plan that recomputes nothing.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import (
    ConfigError,
    ModelExecutePlan,
    RoundPipe,
    RoundPipeRunConfig,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.reference import plain_call

EXPERTS = 4
BATCH = mlp_batch(rows=6)
FUSED = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(5)])
PLANS = {
    "one layer each": ModelExecutePlan(
        fwd_plan=[range(i, i + 1) for i in range(4)],
        bwd_plan=[range(i, i + 1) for i in range(4, -1, -1)],
    ),
    "whole stages": ModelExecutePlan(
        fwd_plan=[range(4)], bwd_plan=[range(4, 5), range(1, 4), range(1)]
    ),
    "fused": FUSED,
}


class Turns:
    """Whose turn it is; shared by all copies of a layer, and so not repeatable."""

    def __init__(self) -> None:
        self.routings = 0

    def next(self) -> int:
        self.routings += 1
        return self.routings

    def __deepcopy__(self, memo: Any) -> "Turns":
        return Turns()


class Routed(nn.Module):
    """Rows go to experts in turn, and the turn moves on with every routing."""

    def __init__(self, *, saves: bool = True) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(EXPERTS))
        self.turns = Turns()
        self.saves = saves

    def forward(self, hidden: Tensor) -> Tensor:
        if doing_recompute() and self.saves:
            expert, extra = get_recompute_data()
            assert extra == {"rows": len(hidden)}
        else:
            expert = (torch.arange(len(hidden)) + self.turns.next()) % EXPERTS
            save_for_recompute(expert, {"rows": len(hidden)})
        output = torch.stack(
            [self.experts[int(e)](row) for e, row in zip(expert, hidden, strict=True)]
        )
        expert += 1  # what was saved, and what was got, is a copy
        return output


def make_routed(**settings: bool) -> nn.Sequential:
    torch.manual_seed(0)
    linear = [nn.Linear(MLP_WIDTH, MLP_WIDTH) for _ in range(2)]
    return nn.Sequential(linear[0], Routed(**settings), nn.Tanh(), Routed(**settings), linear[1])


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_recompute_routes_as_the_forward_did(
    plan: str, grain: str, devices: DeviceSet, engines: Engines
) -> None:
    """The turn moves on once per forward: equal gradients over three calls say that no recompute
    took one."""
    model = make_routed()
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for _ in range(3):
        expected = plain_call(plain, BATCH.split(3), BATCH.loss_fn)
        loss = run_batch(engine, BATCH, 3, execute_plan=PLANS[plan], recompute_grain=grain)
        devices.check(loss, expected.loss)
        devices.check(engine_gradients(engine), expected.gradients)
        engine.zero_grad()
    assert [model[i].turns.routings for i in (1, 3)] == [plain[i].turns.routings for i in (1, 3)]


def test_a_layer_that_routes_again_would_be_noticed(engines: Engines) -> None:
    """The oracle can tell: without the saved routing the gradients are others."""
    expected = plain_call(make_routed(), BATCH.split(3), BATCH.loss_fn)
    engine = engines(make_routed(saves=False), ONE)
    run_batch(engine, BATCH, 3, execute_plan=PLANS["whole stages"])
    gradients = engine_gradients(engine)
    assert not torch.equal(
        gradients["1.experts.0.weight"], expected.gradients["1.experts.0.weight"]
    )


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_saved_data_waits_for_who_made_it(count: int, grain: str, engines: Engines) -> None:
    """On devices that copy late, and on which another device's tensor has to be brought first."""
    adversaries = Adversaries(count)
    expected = plain_call(make_routed(), BATCH.split(3), BATCH.loss_fn)
    engine = engines(make_routed(), adversaries)  # type: ignore[arg-type]
    run_batch(engine, BATCH, 3, execute_plan=PLANS["whole stages"], recompute_grain=grain)
    ONE.check(engine_gradients(engine), expected.gradients)
    assert adversaries.faults == []


def test_a_backward_of_the_users_own_recomputes_with_it_too(
    devices: DeviceSet, engines: Engines
) -> None:
    model = make_routed()
    expected = plain_call(copy.deepcopy(model), BATCH.whole(), BATCH.loss_fn)
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=PLANS["whole stages"])
    BATCH.loss_fn(engine(*BATCH.args, roundpipe_run_config=config), BATCH.label).backward()
    devices.check(engine_gradients(engine), expected.gradients)


def test_without_grad_and_outside_an_engine_nothing_is_saved(engines: Engines) -> None:
    """Saving twice, or what requires grad, is no error there either: it does nothing."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, hidden: Tensor) -> Tensor:
            for _ in range(2):
                save_for_recompute(self.weight)
            assert not doing_recompute()
            return hidden * self.weight

    engine = engines(nn.Sequential(Asks()), TWO)
    with torch.no_grad():
        assert torch.equal(engine(torch.ones(4, 2)), torch.ones(4, 2))
    assert torch.equal(Asks()(torch.ones(4, 2)), torch.ones(4, 2))


class Misuse(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.kind = kind

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.linear(hidden)
        if self.kind == "twice":
            save_for_recompute(hidden.detach())
            save_for_recompute(hidden.detach())
        elif self.kind == "with grad":
            save_for_recompute(output)
        elif self.kind == "got in a forward" or doing_recompute():
            get_recompute_data()
        return output


MISUSES = {
    "twice": "twice",
    "with grad": "requires grad",
    "got in a forward": "doing_recompute",
    "never saved": "did not call save_for_recompute",
}


@pytest.mark.parametrize("kind", MISUSES)
def test_misuse_is_an_error_that_names_the_layer(kind: str, engines: Engines) -> None:
    model = nn.Sequential(Misuse(kind), nn.Linear(MLP_WIDTH, MLP_WIDTH))
    engine = engines(model, TWO)
    with pytest.raises(ConfigError, match=MISUSES[kind]) as caught:
        run_and_wait(engine)
    assert "layer '0" in "".join(caught.value.__notes__)
    assert engine_gradients(engine) == {}


def run_and_wait(engine: RoundPipe) -> None:
    run_batch(engine, BATCH, 2, execute_plan=ModelExecutePlan([range(1)], [range(1, 2), range(1)]))
    engine.synchronize()


def test_a_compiled_layer_asks_every_time() -> None:
    """Compiled code must not remember the answer of the run it was compiled in."""
    from roundpipe.recompute.user_data import LayerRun, Running

    def layer(hidden: Tensor) -> Tensor:
        if doing_recompute():
            return hidden * get_recompute_data()[0]
        save_for_recompute(hidden)
        return hidden * 2

    compiled = torch.compile(layer, backend="eager")
    hidden = torch.ones(2)
    first = LayerRun(is_recompute=False, is_kept=True)
    with Running(first):
        assert torch.equal(compiled(hidden), hidden * 2)
    assert first.saved is not None
    with Running(LayerRun(is_recompute=True, recalled=(torch.full((2,), 3.0),))):
        assert torch.equal(compiled(hidden), hidden * 3)
    with Running(LayerRun(is_recompute=True, recalled=(torch.full((2,), 5.0),))):
        assert torch.equal(compiled(hidden), hidden * 5)
