"""Short pauses while an engine with an accelerator is open, and the interpreter as it was before
afterwards."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from roundpipe.threads import interpreter
from roundpipe.threads.interpreter import QuietInterpreter


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


def settled() -> QuietInterpreter:
    quiet = QuietInterpreter()
    for _ in range(4):
        quiet.begin_call()
    return quiet


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


def test_what_the_program_has_frozen_stays_so_where_no_call_has_settled() -> None:
    """Every engine that was closed thawed it, also one that had run nothing."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    quiet, another = QuietInterpreter(), QuietInterpreter()
    quiet.begin_call()
    quiet.rest()
    quiet.close()
    another.close()
    # Some of what was frozen may have gone by itself.
    assert gc.get_freeze_count() > frozen // 2
    gc.unfreeze()


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
