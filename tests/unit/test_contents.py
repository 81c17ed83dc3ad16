"""What containers held can be had again, whatever is in them now."""

from collections import deque
from typing import Any

import torch

from roundpipe.runtime.contents import Contents, has_tensors


def test_copies_hold_what_was_in_all_levels() -> None:
    inner = [1]
    outer: dict[str, Any] = {"list": inner, "pair": (inner, 2), "queue": deque([inner], maxlen=1), "names": {"a"}}
    contents = Contents([outer])
    inner.append(3)
    outer["names"].add("b")
    del outer["pair"]
    copy = contents.copies()[id(outer)]
    assert copy == {"list": [1], "pair": ([1], 2), "queue": deque([[1]]), "names": {"a"}}
    assert copy["queue"].maxlen == 1


def test_what_was_in_two_places_is_in_both_again() -> None:
    shared, other = [1], [0]
    other.append(shared)  # type: ignore[arg-type]
    copies = Contents([shared, other]).copies()
    assert copies[id(other)][1] is copies[id(shared)] is not shared


def test_a_list_in_itself() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    copy = Contents([ring]).copies()[id(ring)]
    assert copy[1] is copy is not ring


def test_every_copy_is_another() -> None:
    numbers = [1]
    contents = Contents([numbers])
    contents.copies()[id(numbers)].append(2)
    assert contents.copies()[id(numbers)] == [1]


def test_it_is_true_until_something_else_is_in_there() -> None:
    inner: list[int] = []
    contents = Contents([{"list": inner}])
    assert contents.is_true
    inner.append(1)
    assert not contents.is_true
    inner.clear()
    assert contents.is_true


def test_tensors_are_found_in_all_levels() -> None:
    assert has_tensors([{"list": [torch.ones(1)]}])
    assert not has_tensors([{"list": [1]}])
