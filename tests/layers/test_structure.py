"""A snapshot tells whatever was put in the place of something else, and is as true as it was once
that is back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roundpipe.layers.structure import Snapshot

_ONE, _OTHER = [0], [0]  # equal, and two


class _Held:
    """Attributes of which two are looked at, an attribute alone in its dictionary, and
    containers."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {"a": _ONE, "b": None, "beside": 1}
        self.alone: dict[str, Any] = {"c": _ONE}
        self.named: dict[str, Any] = {"d": None, "e": _ONE}
        self.listed: list[Any] = [_ONE]
        self.empty: dict[str, Any] = {}
        self.snapshot = Snapshot(
            [(self.attributes, ["a", "b"]), (self.alone, ["c"])],
            [self.named, self.listed, self.empty],
            sized=[self.attributes, self.alone],
        )


def _rename(held: dict[str, Any], name: str, other: str) -> None:
    value = held.pop(name)
    held[other] = value


_CHANGES: dict[str, Callable[[_Held], object]] = {
    "another value": lambda held: held.attributes.update(a=_OTHER),
    "another value, alone": lambda held: held.alone.update(c=_OTHER),
    "another name": lambda held: _rename(held.attributes, "b", "z"),
    "another name, alone": lambda held: _rename(held.alone, "c", "z"),
    "one more": lambda held: held.attributes.update(z=1),
    "one less": lambda held: held.attributes.pop("b"),
    "another value of all": lambda held: held.named.update(d=1),
    "another name of all": lambda held: _rename(held.named, "e", "z"),
    "another item": lambda held: held.listed.__setitem__(0, _OTHER),
    "one more item": lambda held: held.listed.append(_ONE),
    "one less item": lambda held: held.listed.clear(),
    "the first": lambda held: held.empty.update(z=1),
}


@pytest.fixture
def held() -> _Held:
    held = _Held()
    assert held.snapshot.is_true
    return held


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_every_change_is_seen_and_so_is_that_it_is_undone(
    change: Callable[[_Held], object], held: _Held
) -> None:
    before = {name: value.copy() for name, value in vars(held).items() if name != "snapshot"}
    change(held)
    assert not held.snapshot.is_true
    for name, value in before.items():
        now = getattr(held, name)
        now.clear()
        now.extend(value) if isinstance(now, list) else now.update(value)
    assert held.snapshot.is_true


def test_what_is_not_looked_at_may_change(held: _Held) -> None:
    held.attributes["beside"] = 2
    assert held.snapshot.is_true


def test_taken_again_it_is_of_what_is_there_then(held: _Held) -> None:
    held.attributes["a"] = held.listed[0] = _OTHER
    held.snapshot.take()
    assert held.snapshot.is_true
    held.attributes["a"] = _ONE
    assert not held.snapshot.is_true


def test_it_is_never_true_of_what_had_gone_when_it_was_taken(held: _Held) -> None:
    """The caller may delete an attribute while a late stage run looks."""
    value = held.attributes.pop("a")
    held.snapshot.take()
    assert not held.snapshot.is_true
    held.attributes["a"] = value
    assert not held.snapshot.is_true


@pytest.mark.parametrize("whole", [[], [{"z": 1}]], ids=["names alone", "with a whole"])
def test_forgotten_it_is_not_true(whole: list[Any]) -> None:
    snapshot = Snapshot([({"a": 1}, ["a"])], whole)
    snapshot.forget()
    assert not snapshot.is_true
    snapshot.take()
    assert snapshot.is_true


class _Meddled(dict[str, Any]):
    """Somebody else puts something in while it is being looked at."""

    is_meddled = False

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            if self.is_meddled:
                self["another"] = 1
            yield name


def test_it_is_not_true_of_what_another_thread_is_writing() -> None:
    held = _Meddled(a=1, b=2)
    snapshot = Snapshot((), [held])
    assert snapshot.is_true
    held.is_meddled = True
    assert not snapshot.is_true


def test_nor_of_what_was_being_written_when_it_was_taken() -> None:
    held = _Meddled(a=1, b=2)
    snapshot = Snapshot((), [held])
    held.is_meddled = True
    snapshot.take()
    held.is_meddled = False
    assert not snapshot.is_true
    snapshot.take()
    assert snapshot.is_true
