"""Which optimizer is stepped, and where: what is known of one is not taken for another's, and none
trains nothing."""

import gc

import pytest
import torch
from torch import nn

from roundpipe import ConfigError, RoundPipe
from roundpipe.step.hyperparameters import LearntOptimizers, StepOptimizers
from tests.support.engines import Engines
from tests.support.models import make_mlp


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
    second = RoundPipe(model, devices=1)
    if how == "closed":
        second.close()
    del second
    gc.collect()
    with pytest.raises(ConfigError, match="working weights"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
