"""A stage run goes on with the replica that the stage run before has left, and yet sees the user's
modules as they are now."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan
from roundpipe.layers import replica
from roundpipe.layers.parameters import ReplicaParameters
from tests.support.device_sets import ONE, TWO, DeviceSet
from tests.support.engines import (
    Engines,
    engine_gradients,
    engine_weights,
    reference_steps,
    run_batch,
    train_steps,
)
from tests.support.models import LORA_LLAMA, MLP_WIDTH, make_mlp, mlp_batch
from tests.support.reference import Reference, plain_call

BATCH = mlp_batch(rows=6)
PLANS = {
    "fused": ModelExecutePlan([], [range(3)]),
    "recomputed": ModelExecutePlan([range(2)], [range(2, 3), range(2)]),
}


class Doubling(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


class Layer(nn.Module):
    """Of every kind of thing that a forward may depend on something, which changes nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.register_buffer("shift", torch.zeros(MLP_WIDTH))
        self.factor = 1.0
        self.factors: list[float] = []
        self.named: dict[str, Any] = {"scale": 1.0}
        self.held: list[nn.Module] = []
        self.last_set = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden) * self.factor + self.other(hidden) + self.shift
        for factor in self.factors:
            hidden = hidden * factor
        for held in (*self.held, *self.named.get("more", ())):
            hidden = held(hidden)
        hidden = hidden * self.named["scale"]
        if not hasattr(self, "last_set"):
            hidden = hidden + 1
        return hidden.tanh() if self.training else hidden.sin()


class Closed(nn.Module):
    """Computes by closures over what may be set anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH)
        chosen = self.linear

        def choose(module: nn.Linear) -> None:
            nonlocal chosen
            chosen = module

        self.choose = choose
        self.apply_chosen = lambda hidden: chosen(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.apply_chosen(hidden) + self.other(hidden) / 2)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def set_factor(layer: Any) -> None:
    layer.factor = 3.0


def rename(layer: Any) -> None:
    """As many attributes as before, with the same values in the same order."""
    layer.first_set = layer.__dict__.pop("last_set")


def patch(layer: Any) -> None:
    before = layer.linear.forward
    layer.linear.forward = lambda hidden: 2 * before(hidden)


CHANGES: dict[str, tuple[type[nn.Module], Callable[[Any], Any]]] = {
    "an attribute": (Layer, set_factor),
    "an attribute's name": (Layer, rename),
    "a class": (Layer, lambda layer: setattr(layer.linear, "__class__", Doubling)),
    "what is in a list": (Layer, lambda layer: layer.factors.append(0.5)),
    "what is in a dictionary": (Layer, lambda layer: layer.named.update(scale=2.0)),
    "a module put into a list": (Layer, lambda layer: layer.held.append(layer.linear)),
    "a module put deeper": (Layer, lambda layer: layer.named.update(more=[layer.other])),
    "a hook": (Layer, lambda layer: layer.linear.register_forward_hook(double)),
    "a hook before": (
        Layer,
        lambda layer: layer.other.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
    ),
    "a mode": (Layer, lambda layer: layer.eval()),
    "a forward": (Layer, patch),
    "what a buffer holds": (Layer, lambda layer: layer.shift.add_(1)),
    "a buffer": (Layer, lambda layer: setattr(layer, "shift", torch.ones(MLP_WIDTH))),
    "what a closure refers to": (Closed, lambda layer: layer.choose(layer.other)),
    "what trains": (Layer, lambda layer: layer.linear.requires_grad_(requires_grad=False)),
    "what a weight holds": (Layer, lambda layer: layer.linear.weight.mul_(2)),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "room", [pytest.param(None, marks=pytest.mark.slow), 1.0], ids=["no room", "resident"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_changes_between_calls_is_seen(
    change: str, room: float | None, plan: str, engines: Engines
) -> None:
    make, do = CHANGES[change]
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(MLP_WIDTH, MLP_WIDTH), make())
    engine = engines(model, max_gpu_memory=room)
    for _ in range(2):
        run_batch(engine, BATCH, 2, execute_plan=PLANS[plan])
    engine.zero_grad()
    engine.synchronize()  # because late stage runs read weights and closures as they are by then
    with torch.no_grad():
        do(model[0])
        do(model[2])
    expected = plain_call(model, BATCH.split(2), BATCH.loss_fn)
    for _ in range(2):
        engine.zero_grad()
        ONE.check(run_batch(engine, BATCH, 2, execute_plan=PLANS[plan]), expected.loss)
        ONE.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("room", [None, 1.0], ids=["no room", "resident"])
def test_a_hook_that_is_removed_is_gone(room: float | None, plan: str, engines: Engines) -> None:
    model = nn.Sequential(Layer(), nn.Linear(MLP_WIDTH, MLP_WIDTH), Layer())
    expected = plain_call(copy.deepcopy(model), BATCH.split(2), BATCH.loss_fn)
    engine = engines(model, max_gpu_memory=room)
    run_batch(engine, BATCH, 2, execute_plan=PLANS[plan])
    handle = model[0].linear.register_forward_hook(double)
    run_batch(engine, BATCH, 2, execute_plan=PLANS[plan])
    handle.remove()
    ONE.check(run_batch(engine, BATCH, 2, execute_plan=PLANS[plan]), expected.loss)


@pytest.mark.parametrize(
    "plan", [None, ModelExecutePlan([range(3)], [range(3, 6), range(3)])], ids=["fused", "staged"]
)
def test_modules_are_copied_once_for_all_stage_runs(
    plan: ModelExecutePlan | None, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying the modules of a layer with adapters takes longer than queueing its kernels."""
    copied: list[nn.Module] = []
    of = replica._Replication.of

    def counted(self: Any, module: nn.Module) -> nn.Module:
        copied.append(module)
        return of(self, module)

    engine = engines(LORA_LLAMA.make())
    run_batch(engine, LORA_LLAMA.batch(6, 0), 2, execute_plan=plan)
    monkeypatch.setattr(replica._Replication, "of", counted)
    for seed in range(2):
        run_batch(engine, LORA_LLAMA.batch(6, seed), 2, execute_plan=plan)
    assert copied == []


class HooksItsWeight(nn.Module):
    """Leaves a hook on its weight in every forward. On the same parameter they would become more
    and more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.linear.bias.requires_grad_(
            requires_grad=False
        )  # so that the layer stays on the device

    def forward(self, hidden: Tensor) -> Tensor:
        self.linear.weight.register_hook(lambda gradient: 2 * gradient)
        return self.linear(hidden).tanh()


def test_what_a_forward_hangs_on_a_weight_goes_with_the_stage_run(engines: Engines) -> None:
    model = nn.Sequential(HooksItsWeight(), HooksItsWeight())
    expected = plain_call(copy.deepcopy(model), BATCH.whole(), BATCH.loss_fn)
    engine = engines(model, max_gpu_memory=1.0)
    for _ in range(3):
        engine.zero_grad()
        run_batch(engine, BATCH, 1)
        ONE.check(engine_gradients(engine), expected.gradients)


class NotesGradients(nn.Module):
    """Sets an attribute in its backward."""

    seen: "list[weakref.ref[Tensor]]" = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.gradient = None

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.gradient is None
        output: Tensor = self.linear(hidden)
        output.register_hook(self.note)
        return output.tanh()

    def note(self, gradient: Tensor) -> None:
        kept = gradient.clone()
        self.__dict__["gradient"] = kept
        self.seen.append(weakref.ref(kept))


def test_what_a_backward_sets_does_not_stay_on_the_device(engines: Engines) -> None:
    model = nn.Sequential(NotesGradients(), NotesGradients())
    engine = engines(model, max_gpu_memory=1.0)
    NotesGradients.seen.clear()
    for _ in range(3):
        run_batch(engine, BATCH, 1)
    engine.synchronize()
    assert len(NotesGradients.seen) == 6
    assert [kept() for kept in NotesGradients.seen] == [None] * 6


def test_what_a_call_has_left_when_it_failed_is_not_gone_on_with(engines: Engines) -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    expected = plain_call(copy.deepcopy(model), BATCH.split(2), BATCH.loss_fn)
    engine = engines(model, TWO, max_gpu_memory=1.0)

    def failing(output: Tensor, _: Tensor) -> Tensor:
        raise ZeroDivisionError

    for plan in (PLANS["recomputed"], PLANS["fused"]) * 2:
        with pytest.raises(ZeroDivisionError):
            run_batch(engine, BATCH._replace(loss_fn=failing), 2, execute_plan=plan)
        engine.zero_grad()
        TWO.check(run_batch(engine, BATCH, 2, execute_plan=plan), expected.loss)
        TWO.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize("room", [None, 1.0], ids=["no room", "resident"])
def test_replicas_that_wait_hold_no_slots(room: float | None, engines: Engines) -> None:
    """Of layers that do not stay on the device others need the memory."""
    model = make_mlp()
    model[:-1].requires_grad_(requires_grad=False)
    engine = engines(model, max_gpu_memory=room)
    plan = ModelExecutePlan([range(3), range(3, 6)], [range(6, 7), range(3, 6), range(3)])
    run_batch(engine, mlp_batch(rows=6), 2, execute_plan=plan)
    engine.synchronize()
    own = set(map(id, [*model, *model.parameters()]))
    waiting = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, replica.Replica) and id(thing.pairs[0][0]) in own
    ]
    assert len(waiting) == len(model)
    assert not any(list(waits.module.parameters()) for waits in waiting)
    kept = [
        thing
        for thing in gc.get_objects()
        if isinstance(thing, ReplicaParameters) and not own.isdisjoint(thing.parameters)
    ]
    assert bool(kept) == (room is not None)


@pytest.mark.parametrize("room", [None, 1.0], ids=["no room", "resident"])
@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.slow), True])
def test_training_with_adapters(
    is_async: bool, room: float | None, devices: DeviceSet, engines: Engines
) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    model, batches = LORA_LLAMA.make(), [LORA_LLAMA.batch(6, number) for number in range(5)]
    reference = Reference(model, sgd, staleness=int(is_async))
    expected = reference_steps(reference, batches, 3)
    engine = engines(model, devices, max_gpu_memory=room)
    losses = train_steps(engine, sgd(engine.optim_parameters()), batches, 3, is_async=is_async)
    devices.check(torch.stack(losses), torch.stack(expected))
    devices.check(engine_weights(engine), reference.weights)
