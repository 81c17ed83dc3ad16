"""Short pauses while an engine with an accelerator is open, and the interpreter as it was before
afterwards."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.step.hyperparameters import LearntOptimizers
from roundpipe.threads import interpreter
from roundpipe.threads.interpreter import QuietInterpreter
from tests.support.optimizers import PATIENCE_S


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    gc.unfreeze()  # what the suite has frozen: the first interpreter to end would do so
    before, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    yield
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, frozen)


def test_what_has_settled_is_not_collected_again_until_the_end() -> None:
    quiet = QuietInterpreter()
    frozen = [gc.get_freeze_count()]
    for _ in range(4):
        quiet.begin_call()
        frozen.append(gc.get_freeze_count())
    quiet.close()
    quiet.close()
    assert frozen[:4] == [0, 0, 0, 0] < frozen[4:]


def test_optimizers_are_found_also_when_they_are_frozen() -> None:
    """The first step after four calls of accumulation looks for all that will step, because
    schedulers go on."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    quiet = QuietInterpreter()
    for _ in range(4):
        quiet.begin_call()
    learnt = LearntOptimizers()
    learnt.find([parameter])
    quiet.close()
    assert learnt.snapshot().keys() == {id(optimizer)}


def make_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def settled() -> QuietInterpreter:
    quiet = QuietInterpreter()
    for _ in range(4):
        quiet.begin_call()
    return quiet


def test_optimizers_are_looked_for_while_another_thread_freezes_more() -> None:
    """The first step of one engine and the fourth call of another, on two threads."""
    optimizers, quiet = [make_optimizer(), make_optimizer()], [settled()]
    optimizers.append(make_optimizer())
    is_looking = threading.Event()

    def go_on_elsewhere(frame: FrameType, event: str, _: Any) -> None:
        """One has been looked at, the next has not."""
        if event == "return" and frame.f_code.co_name == "__iter__" and not is_looking.is_set():
            is_looking.set()
            other = threading.Thread(target=lambda: quiet.append(settled()))
            other.start()
            other.join(PATIENCE_S)

    sys.setprofile(go_on_elsewhere)
    try:
        found = interpreter.optimizers()
        found_later = interpreter.optimizers()
    finally:
        sys.setprofile(None)
        for each in quiet:
            each.close()
    assert is_looking.is_set()
    assert set(optimizers[:2]) <= set(found)
    assert set(optimizers) <= set(found_later)


def test_what_another_thread_is_making_is_let_alone() -> None:
    """A tuple cannot be finished that somebody else knows of already."""
    found = []

    def making() -> Iterator[int]:
        found.append(interpreter._collectable_optimizers())
        yield from range(3)

    assert tuple(making()) == (0, 1, 2)


def test_optimizers_of_the_users_own_classes_are_found() -> None:
    class Mine(torch.optim.SGD):
        pass

    mine = Mine([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert any(found is mine for found in interpreter.optimizers())


def test_what_was_frozen_is_found_once_when_it_no_longer_is() -> None:
    """However often engines come and go."""
    optimizer = make_optimizer()
    for _ in range(2):
        settled().close()
        assert sum(found is optimizer for found in interpreter.optimizers()) == 1


class Dropped:
    """Something in a circle of references, as a Trainer is."""

    def __init__(self) -> None:
        self.circle = self


def test_what_is_dropped_in_a_circle_is_collected_once_training_has_ended() -> None:
    """It was kept for ever: its engine was never closed, which would have ended that."""
    dropped = Dropped()
    reference = weakref.ref(dropped)
    quiet = settled()
    del dropped
    gc.collect()
    assert reference() is not None
    quiet.rest()
    gc.collect()
    assert reference() is None
    for _ in range(4):
        quiet.begin_call()
    assert gc.get_freeze_count()
    quiet.close()


def test_another_one_finds_what_was_dropped_before() -> None:
    """Whoever drops an engine and makes another has memory for one."""
    dropped = Dropped()
    reference = weakref.ref(dropped)
    first = settled()
    del dropped
    second = QuietInterpreter()
    assert reference() is None
    for _ in range(4):
        first.begin_call()
    assert gc.get_freeze_count()
    first.close()
    second.close()


def test_the_last_one_open_restores_everything() -> None:
    before = sys.getswitchinterval()
    first, second = QuietInterpreter(), QuietInterpreter()
    first.close()
    assert sys.getswitchinterval() < before
    second.close()


def test_a_collection_may_end_one_while_another_begins() -> None:
    """Collections run between any two instructions, so the finalizer may find its own thread inside
    the lock."""
    before = sys.getswitchinterval()
    quiet = QuietInterpreter()
    assert sys.getswitchinterval() < before
    with interpreter._lock:
        del quiet
        assert sys.getswitchinterval() == before


def test_one_that_was_never_closed_ends_with_its_engine() -> None:
    before = sys.getswitchinterval()
    quiet = settled()
    assert sys.getswitchinterval() < before
    assert gc.get_freeze_count()
    del quiet
    assert sys.getswitchinterval() == before
    assert not gc.get_freeze_count()
