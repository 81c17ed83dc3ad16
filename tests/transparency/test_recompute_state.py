"""Layers whose output depends on what they remember: the recompute sees what the forward saw, and
remembers nothing.

Each kind of memory is tried in the middle of three microbatches and three calls, so that it differs
in every forward. The oracle is the plain model, run microbatch by microbatch.
"""

import copy
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, doing_recompute
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.late_work import LATE, make_pausing, open_gate
from tests.support.models import MLP_WIDTH, mlp_batch
from tests.support.optimizers import PATIENCE_S, Gate
from tests.support.reference import buffers_of, plain_call

BATCHES = [mlp_batch(rows=6, seed=seed) for seed in range(3)]
PLANS = {
    "one layer each": ModelExecutePlan(
        fwd_plan=[range(i, i + 1) for i in range(3)],
        bwd_plan=[range(i, i + 1) for i in range(3, -1, -1)],
    ),
    "whole stages": ModelExecutePlan(fwd_plan=[range(3)], bwd_plan=[range(3, 4), range(3)]),
}
FUSED = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(4)])


class Remembering(nn.Module):
    """Holds a running mean in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(MLP_WIDTH))
        self.register_buffer("fixed", torch.linspace(1, 2, MLP_WIDTH))
        self.weight = nn.Parameter(torch.ones(MLP_WIDTH))


class InPlace(Remembering):
    def forward(self, hidden: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(hidden.detach().mean(0))
        return hidden * self.weight * self.fixed + hidden.square() * self.mean


class Replaced(Remembering):
    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden * self.weight + hidden.square() * self.mean
        self.mean = self.mean * 0.5 + hidden.detach().mean(0)
        return output


class Silent(Remembering):
    """Through a kernel that does not raise the buffer's version, and without a counter."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = nn.functional.batch_norm(
            hidden, self.mean, torch.ones_like(self.mean), self.weight, training=True
        )
        return hidden + hidden.square() * self.mean


class NowAndThen(Remembering):
    """Writes only in the fifth forward, when everybody takes it for one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        output = hidden * self.weight + hidden.square() * self.mean.clone()
        if self.count == 5:
            self.mean.add_(hidden.detach().mean(0))
        return output


class Attribute(Remembering):
    """Made by the first forward, and deleted by every third."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.factor = getattr(self, "factor", 1.0) * 1.5
        output = hidden * self.weight * self.factor
        if self.factor > 3:
            del self.factor
        return output


class Carrying(Remembering):
    """From microbatch to microbatch, in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(MLP_WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden * self.weight + hidden.square() * self.last.clone()
        self.last += hidden.detach().mean(0)
        return output


class Listed(Remembering):
    """In a list of the user's own, and in one that lies deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]
        self.named = {"more": [1.0]}

    def forward(self, hidden: Tensor) -> Tensor:
        self.factors.append(1.5 * self.factors[-1])
        self.named["more"].append(0.5 * self.named["more"][-1])
        return hidden * self.weight * self.factors[-1] + hidden.square() * self.named["more"][-1]


class Ring(Remembering):
    """A list in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: list[Any] = [1.0]
        self.ring.append(self.ring)

    def forward(self, hidden: Tensor) -> Tensor:
        self.ring[1][0] += 0.5
        return hidden * self.weight * self.ring[0]


class Shared(nn.Module):
    """Two modules hold one buffer: what one writes the other reads."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = InPlace(), Replaced()
        self.reader.mean = self.writer.mean

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.writer(hidden)
        return hidden * self.reader.weight + hidden.square() * self.reader.mean


def spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(MLP_WIDTH, MLP_WIDTH))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in place": InPlace,
    "replaced": Replaced,
    "silently": Silent,
    "now and then": NowAndThen,
    "attribute": Attribute,
    "in lists": Listed,
    "in a ring": Ring,
    "shared by two modules": Shared,
    "spectral norm": spectral,
    "batch norm": lambda: nn.BatchNorm1d(MLP_WIDTH),
}


def make_model(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Linear(MLP_WIDTH, MLP_WIDTH)
    return nn.Sequential(first, kind(), nn.Tanh(), last)


@pytest.mark.parametrize(
    ("plan", "grain"), [("one layer each", "stage"), ("whole stages", "layer")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_recompute_sees_what_the_forward_saw(
    kind: str, plan: str, grain: str, devices: DeviceSet, engines: Engines
) -> None:
    model = make_model(KINDS[kind])
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for batch in BATCHES:
        expected = plain_call(plain, batch.split(3), batch.loss_fn)
        loss = run_batch(engine, batch, 3, execute_plan=PLANS[plan], recompute_grain=grain)
        devices.check(loss, expected.loss)
        devices.check(engine_gradients(engine), expected.gradients)
        devices.check(buffers_of(model), buffers_of(plain))
        engine.zero_grad()


def test_what_a_recompute_puts_into_a_list_is_dropped(devices: DeviceSet, engines: Engines) -> None:
    """As what it sets is. The user's own list has what forwards have put in, once."""
    model, batch = make_model(Listed), BATCHES[0]
    plain = copy.deepcopy(model)
    plain_call(plain, batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    run_batch(engine, batch, 3, execute_plan=PLANS["whole stages"], recompute_grain="layer")
    engine.synchronize()
    assert (model[1].factors, model[1].named) == (plain[1].factors, plain[1].named)


class Leaving(nn.Module):
    """Its recomputes leave in a dictionary what they have made, with a graph behind it.

    No buffer, so that stage runs leave each other all that they know of it.
    """

    made: list[weakref.ref[Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MLP_WIDTH))
        self.kept: dict[str, Tensor] = {}
        type(self).made = []

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden * self.weight
        if doing_recompute():
            self.kept["output"] = output
            type(self).made.append(weakref.ref(output))
        return torch.tanh(output)


def test_tensors_that_a_recompute_leaves_in_a_dictionary_are_freed(engines: Engines) -> None:
    engine = engines(make_model(Leaving))
    run_batch(engine, BATCHES[0], 1, execute_plan=PLANS["one layer each"])
    engine.synchronize()
    gc.collect()
    assert [made() for made in Leaving.made] == [None]


class NewLists(Remembering):
    """What it remembers is in a list and a tuple that every forward makes anew."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.factors = [*getattr(self, "factors", [1.0]), 1.5]
        self.length = (len(getattr(self, "length", ())), *getattr(self, "length", ()))
        return hidden * self.weight * sum(self.factors) + hidden.square() * len(self.length)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_lists_that_forwards_make_are_seen_by_recomputes(
    grain: str, devices: DeviceSet, engines: Engines
) -> None:
    """Though the next call does not see them."""
    model, batch = make_model(NewLists), BATCHES[0]
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    run_batch(engine, batch, 3, execute_plan=PLANS["whole stages"], recompute_grain=grain)
    devices.check(engine_gradients(engine), expected.gradients)


class Overtaken(Remembering):
    """Writes for the first time in its second forward, which ends only when the first one's
    recompute has read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.has_written, self.has_read = threading.Event(), threading.Event()

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        meets = doing_recompute() and self.count == 1
        assert not meets or self.has_written.wait(PATIENCE_S), "the second forward never wrote"
        output = hidden * self.weight + hidden.square() * self.mean.clone()
        if meets:
            self.has_read.set()
        if self.count == 2 and not doing_recompute():
            self.mean.add_(hidden.detach().mean(0))
            self.has_written.set()
            assert self.has_read.wait(PATIENCE_S), (
                "the first microbatch was not recomputed meanwhile"
            )
        return output


def test_what_a_later_forward_writes_on_another_device_at_that_moment_is_not_seen(
    engines: Engines,
) -> None:
    """On three devices the backward stage runs beside the forward stage, of which nobody knows yet
    that it writes."""
    model, batch = make_model(Overtaken), BATCHES[0]
    plain = make_model(Overtaken)
    plain[1].has_read.set()
    expected = plain_call(plain, batch.split(3), batch.loss_fn)
    engine = engines(model, THREE)
    # Without random numbers, because on virtual devices layers that may draw wait for each other.
    run_batch(engine, batch, 3, execute_plan=PLANS["whole stages"], preserve_rng_state=False)
    THREE.check(engine_gradients(engine), expected.gradients)
    THREE.check(buffers_of(model), buffers_of(plain))


def test_silent_writes_that_a_fused_stage_has_shown(devices: DeviceSet, engines: Engines) -> None:
    """The next call's plan recomputes the layer that was known to write, though not by those who
    keep for recompute."""
    model = make_model(Silent)
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for batch, plan in zip(BATCHES, [FUSED, *PLANS.values()], strict=True):
        expected = plain_call(plain, batch.split(3), batch.loss_fn)
        run_batch(engine, batch, 3, execute_plan=plan)
        devices.check(engine_gradients(engine), expected.gradients)
        devices.check(buffers_of(model), buffers_of(plain))
        engine.zero_grad()


def test_buffers_that_are_shared_only_from_the_second_call_on(
    devices: DeviceSet, engines: Engines
) -> None:
    """One of the two modules is known to write by then, the other is not."""
    model = make_model(Shared)
    plain = copy.deepcopy(model)
    engine = engines(model, devices)
    for shared in (model[1], plain[1]):
        shared.reader.mean = shared.reader.mean.clone()
    for batch in BATCHES:
        expected = plain_call(plain, batch.split(3), batch.loss_fn)
        run_batch(engine, batch, 3, execute_plan=PLANS["whole stages"])
        devices.check(engine_gradients(engine), expected.gradients)
        devices.check(buffers_of(model), buffers_of(plain))
        engine.zero_grad()
        for shared in (model[1], plain[1]):
            shared.reader.mean = shared.writer.mean


class Alias(nn.Module):
    """Has its weight under a second name, where torch does not look for parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.__dict__["alias"] = self.linear.weight

    def forward(self, hidden: Tensor) -> Tensor:
        aliased: Tensor = torch.tanh(self.linear(hidden) @ self.alias)
        return aliased


def test_a_weight_that_is_also_a_plain_attribute_gets_all_its_gradient(
    devices: DeviceSet, engines: Engines
) -> None:
    model, batch = make_model(Alias), BATCHES[0]
    expected = plain_call(make_model(Alias), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    run_batch(engine, batch, 3, execute_plan=PLANS["one layer each"])
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)


@pytest.mark.parametrize("kind", [*KINDS, "carrying"])
def test_a_backward_of_the_users_own_sees_it_too(
    kind: str, devices: DeviceSet, engines: Engines
) -> None:
    """By then the user's modules have everything that the forward wrote."""
    model = make_model(KINDS.get(kind, Carrying))
    batch = BATCHES[0]
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    plan = PLANS["whole stages"]
    config = RoundPipeRunConfig(
        num_microbatch=3, execute_plan=plan, recompute_grain="layer", merge_output=False
    )
    outputs = engine(*batch.args, roundpipe_run_config=config)
    labels = batch.label.chunk(3)
    losses = [
        batch.loss_fn(o, label.to(o.device)) for o, label in zip(outputs, labels, strict=True)
    ]
    torch.stack([loss.cpu() for loss in losses]).sum().backward()
    devices.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_waits_for_who_made_it(kind: str, count: int, engines: Engines) -> None:
    adversaries = Adversaries(count)
    model = make_model(KINDS[kind])
    plain = copy.deepcopy(model)
    engine = engines(model, adversaries)  # type: ignore[arg-type]
    for batch in BATCHES:
        expected = plain_call(plain, batch.split(3), batch.loss_fn)
        run_batch(engine, batch, 3, execute_plan=PLANS["one layer each"], recompute_grain="layer")
        ONE.check(engine_gradients(engine), expected.gradients)
        ONE.check(buffers_of(model), buffers_of(plain))
        engine.zero_grad()
    assert adversaries.faults == []


class Scaled(nn.Module):
    """By a buffer and by a number, neither of which a forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((MLP_WIDTH,), 2.0))
        self.number = 3.0
        self.weight = nn.Parameter(torch.ones(MLP_WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight * self.scale * self.number


class Containing(nn.Module):
    """Numbers in containers, and no buffer, so that stage runs leave each other all that they know
    of it."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = [2.0]
        self.named = {"more": [2.0], "one": 2.0}
        self.used = {"one"}
        self.latest = deque([2.0], maxlen=1)

    def forward(self, hidden: Tensor) -> Tensor:
        named = sum(self.named[name] for name in self.used)
        factor = sum(self.factors) * sum(self.named["more"]) * (1 + named) * self.latest[0]
        return torch.tanh(hidden * factor / 100)


def make_changeable(gate: Gate) -> nn.Sequential:
    return make_pausing(gate, Scaled(), Containing())


CHANGES: dict[str, Callable[[Any], object]] = {
    "buffer": lambda model: model[1].scale.fill_(5.0),
    "another buffer": lambda model: setattr(model[1], "scale", torch.full((MLP_WIDTH,), 5.0)),
    "attribute": lambda model: setattr(model[1], "number", 5.0),
    "new attribute": lambda model: setattr(model[1], "another", 5.0),
    "what is in a list": lambda model: model[2].factors.append(5.0),
    "another list": lambda model: setattr(model[2], "factors", [5.0]),
    "what is in a dictionary": lambda model: model[2].named.update(one=5.0),
    "what is deeper": lambda model: model[2].named["more"].append(5.0),
    "what is in a set": lambda model: model[2].used.clear(),
    "what is in a queue": lambda model: model[2].latest.append(5.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
def test_what_the_user_changes_after_the_call_is_for_the_next_one(
    change: str, devices: DeviceSet, engines: Engines
) -> None:
    """A late stage run recomputes what the call computed."""
    batch = BATCHES[0]
    expected = plain_call(make_changeable(open_gate()), batch.split(2), batch.loss_fn)
    gate = Gate()
    model = make_changeable(gate)
    engine = engines(model, devices)
    run_batch(engine, batch, 2, execute_plan=LATE)
    CHANGES[change](model)
    gate.open()
    devices.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("devices", [ONE, TWO], ids=str)
def test_what_the_user_changes_before_a_late_stage_run_the_next_call_sees_in_all_passes(
    change: str, devices: DeviceSet, engines: Engines
) -> None:
    """Though the late stage run has left its modules as the call before saw them."""
    batch = BATCHES[0]
    plain = make_changeable(open_gate())
    CHANGES[change](plain)
    expected = plain_call(plain, batch.split(2), batch.loss_fn)
    gate = Gate()
    model = make_changeable(gate)
    engine = engines(model, devices)
    run_batch(engine, batch, 2, execute_plan=LATE)
    CHANGES[change](model)
    gate.open()
    engine.zero_grad()
    run_batch(engine, batch, 2, execute_plan=LATE)
    devices.check(engine_gradients(engine), expected.gradients)


class Unsettled(Remembering):
    """Returns a float tensor that carries no gradient, so that it is looked at anew in every
    run."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.mean += 0.5
        return hidden * self.weight * self.mean, self.mean


class Routed(nn.Module):
    """Its forward is not repeatable, so it asks for what it has saved; it is unsettled too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.routes: list[Tensor] = []

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if roundpipe.doing_recompute():
            (scale,) = roundpipe.get_recompute_data()
        else:
            scale = torch.full((MLP_WIDTH,), 1.0 + len(self.routes), device=hidden.device)
            self.routes.append(scale)
            roundpipe.save_for_recompute(scale)
        return self.linear(hidden) * scale, torch.ones(MLP_WIDTH, device=hidden.device)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        output: Tensor = self.linear(value[0] * value[1])
        return output


@pytest.mark.parametrize("kind", [Unsettled, Routed])
def test_a_layer_that_is_looked_at_anew_in_a_recompute_is_recomputed(
    kind: Callable[[], nn.Module], devices: DeviceSet, engines: Engines
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), kind(), First())
    batch = BATCHES[0]
    expected = plain_call(copy.deepcopy(model), batch.split(3), batch.loss_fn)
    engine = engines(model, devices)
    whole = ModelExecutePlan(fwd_plan=[range(3)], bwd_plan=[range(3)])
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=whole, recompute_grain="layer")
    output = engine(*batch.args, roundpipe_run_config=config)
    batch.loss_fn(output, batch.label.to(output.device)).backward()
    devices.check(engine_gradients(engine), expected.gradients, bitwise=False)


@pytest.mark.parametrize("kind", ["in place", "batch norm", "fixed"])
def test_values_that_no_buffer_has_any_more_are_forgotten(kind: str, engines: Engines) -> None:
    """Whether forwards write the buffer or the user does, between calls."""
    engine = engines(make_model(KINDS.get(kind, Scaled)), TWO)

    def tensors_after_calls() -> int:
        for _ in range(6):
            run_batch(engine, BATCHES[0], 3, execute_plan=PLANS["whole stages"])
            engine.zero_grad()
            engine.synchronize()
            for buffer in engine.model.buffers():
                buffer.mul_(1)
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    assert tensors_after_calls() >= tensors_after_calls()
