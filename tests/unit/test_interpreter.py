"""Short pauses while an engine with an accelerator is open, and the interpreter as it was before afterwards."""

import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from roundpipe.optim.hyperparameters import LearntOptimizers
from roundpipe.runtime import interpreter
from roundpipe.runtime.interpreter import QuietInterpreter


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
    """The first step after four calls of accumulation looks for all that will step, because schedulers go on."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    quiet = QuietInterpreter()
    for _ in range(4):
        quiet.begin_call()
    learnt = LearntOptimizers()
    learnt.find([parameter])
    quiet.close()
    assert learnt.snapshot().keys() == {id(optimizer)}


def test_the_last_one_open_restores_everything() -> None:
    before = sys.getswitchinterval()
    first, second = QuietInterpreter(), QuietInterpreter()
    first.close()
    assert sys.getswitchinterval() < before
    second.close()


def test_a_collection_may_end_one_while_another_begins() -> None:
    """Collections run between any two instructions, so the finalizer may find its own thread inside the lock."""
    quiet = QuietInterpreter()
    with interpreter._lock:
        del quiet


def test_one_that_was_never_closed_ends_with_its_engine() -> None:
    quiet = QuietInterpreter()
    del quiet
