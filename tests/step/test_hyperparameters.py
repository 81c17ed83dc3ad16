"""Which optimizer is stepped, and where: what is known of one is not taken for another's, and none
trains nothing."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError, RoundPipe
from roundpipe.step.hyperparameters import LearntOptimizers, StepOptimizers
from tests.support.engines import Engines
from tests.support.models import make_mlp
from tests.support.optimizers import PATIENCE_S


def make_sgd(lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def test_another_optimizer_does_not_step_with_the_learning_rate_of_one_that_is_gone() -> None:
    """Made in step_fn, say, after the one that was there at the call."""
    learnt, first, second = LearntOptimizers(), make_sgd(lr=0.5), make_sgd(lr=0.25)
    learnt.learn(first)
    taken = {
        id(second): learnt.snapshot()[id(first)]
    }  # as if the second were where the first has been
    del first
    step = StepOptimizers(learnt, taken, on_enter=lambda: None)
    assert step.stand_in(second).param_groups[0]["lr"] == 0.25


def test_what_one_that_is_gone_has_written_itself_is_not_known_of_another() -> None:
    """Such values are taken from its groups when it steps, not as they were at the call."""
    learnt, first, second = LearntOptimizers(), make_sgd(lr=0.5), make_sgd(lr=0.25)
    learnt.learn(first)
    learnt._known[id(second)] = learnt._known.pop(id(first))
    learnt.self_written[id(second)] = {"lr"}
    del first
    learnt.learn(second)
    step = StepOptimizers(learnt, learnt.snapshot(), on_enter=lambda: None)
    second.param_groups[0]["lr"] = 0.125  # a scheduler's, after the call
    assert step.stand_in(second).param_groups[0]["lr"] == 0.25


def test_the_optimizer_of_another_engine_is_refused(engines: Engines) -> None:
    """A notebook cell that wraps, run again without the one that makes the optimizer: nothing was
    trained."""
    model = make_mlp()
    optimizer = torch.optim.SGD(engines(model).optim_parameters(), lr=0.1)
    second = engines(model)
    second(torch.ones(2, 16)).square().mean().backward()
    with pytest.raises(ConfigError, match="another engine's copies"):
        second.step(optimizer.step, is_async=False)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_plain_optimizer_is_refused_while_any_engine_is_open(how: str, engines: Engines) -> None:
    """It would train nothing: gradients go to the engine's copies."""
    model = make_mlp()
    engines(model)
    before = set(threading.enumerate())
    second = RoundPipe(model, devices=1)
    started = set(threading.enumerate()) - before
    if how == "closed":
        second.close()
    del second
    gc.collect()
    with pytest.raises(ConfigError, match="working weights"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for thread in started:
        thread.join(PATIENCE_S)  # because a forgotten engine's end when they get round to it
        assert not thread.is_alive()


class Mine(torch.optim.SGD):
    """A user's own."""


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adafactor, roundpipe.optim.SGD, Mine]
)
def test_an_optimizer_is_known_from_when_it_is_made(kind: Any, engines: Engines) -> None:
    """By the engine whose masters it is over, also if these come in a group that is added later:
    its first step has the hyper-parameters of the call, whatever a scheduler does meanwhile."""
    engine, other = engines(nn.Sequential(nn.Linear(2, 2))), engines(nn.Sequential(nn.Linear(2, 2)))
    masters = engine.optim_parameters()
    own = kind(masters, lr=0.1)
    elsewhere = kind(other.optim_parameters(), lr=0.1)
    later = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert engine._steps._learnt.snapshot().keys() == {id(own)}
    later.add_param_group({"params": masters[:1]})
    assert engine._steps._learnt.snapshot().keys() == {id(own), id(later)}
    assert other._steps._learnt.snapshot().keys() == {id(elsewhere)}


def test_all_that_an_asynchronous_first_step_steps_have_the_hyper_parameters_of_the_call(
    engines: Engines,
) -> None:
    """Also the second, which nobody has seen when the first has begun and the caller goes on."""
    engine = engines(nn.Sequential(nn.Linear(2, 2)))
    masters = engine.optim_parameters()
    optimizers = [torch.optim.SGD([master], lr=0.1) for master in masters]
    has_changed = threading.Event()

    def step_fn() -> None:
        optimizers[0].step()
        assert has_changed.wait(PATIENCE_S)
        optimizers[1].step()

    before = [master.detach().clone() for master in masters]
    engine.forward_backward((torch.ones(2, 2),), loss_fn=lambda out, _: out.sum())
    handle = engine.step(step_fn)
    optimizers[1].param_groups[0]["lr"] = 0.0
    has_changed.set()
    handle.wait()
    assert not torch.equal(before[1], masters[1].detach())
