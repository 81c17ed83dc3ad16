"""Waiting for a step: one interrupt is raised when the update is over, a second one at once. And
whom a step has to wait for, because nobody knows yet with which hyper-parameters it is going to
step."""

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.step.hyperparameters import LearntOptimizers
from tests.support.device_sets import ONE
from tests.support.engines import Engines
from tests.support.optimizers import PATIENCE_S


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.fixture
def came() -> Iterator[list[threading.Event]]:
    """Set one by one, as interrupts are raised in the main thread."""
    events, left = [threading.Event(), threading.Event()], iter(range(2))

    def interrupt(*_: Any) -> None:
        events[next(left)].set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    yield events
    signal.signal(signal.SIGINT, before)


def test_two_interrupts_leave_a_step_that_hangs(
    engines: Engines, came: list[threading.Event]
) -> None:
    engine = engines(nn.Linear(2, 1), ONE)
    engine.optim_parameters()
    engine.forward_backward((torch.ones(2, 2),), loss_fn=lambda outputs, _: outputs.sum())
    release, has_ended = threading.Event(), threading.Event()
    main_thread = threading.get_ident()

    def hang() -> None:
        for event in came:
            while (
                not event.is_set()
            ):  # Python looks for one before it waits, so one that comes in between wakes nobody
                signal.pthread_kill(main_thread, signal.SIGINT)
                event.wait(0.1)
        release.wait(PATIENCE_S)
        has_ended.set()

    with pytest.raises(KeyboardInterrupt):
        engine.step(hang, is_async=False)
    assert not has_ended.is_set()
    release.set()


def test_an_optimizer_that_is_gone_may_have_been_followed_by_another() -> None:
    learnt, optimizer = LearntOptimizers(), make_optimizer()
    assert learnt.forget_gone()
    learnt.learn(optimizer)
    assert not learnt.forget_gone()
    del optimizer
    gc.collect()
    assert learnt.forget_gone()


def test_one_that_lies_where_another_was_is_not_taken_for_it() -> None:
    learnt, optimizer, other = LearntOptimizers(), make_optimizer(), make_optimizer()
    learnt._known[id(optimizer)] = weakref.ref(other)
    del other
    gc.collect()
    learnt.learn(optimizer)
    assert learnt.snapshot().keys() == {id(optimizer)}
