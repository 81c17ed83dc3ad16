"""What containers held can be had again, whatever is in them now."""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch

from roundpipe.layers.contents import Contents, has_tensors


def test_copies_hold_what_was_in_all_levels() -> None:
    inner = [1]
    outer: dict[str, Any] = {
        "list": inner,
        "pair": (inner, 2),
        "queue": deque([inner], maxlen=1),
        "names": {"a"},
    }
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


def test_a_list_in_a_tuple_in_it() -> None:
    ring: list[Any] = []
    pair = (ring, 1)
    ring.append(pair)
    copies = Contents([pair]).copies()
    assert copies[id(pair)][0] is copies[id(ring)] is copies[id(ring)][0][0] is not ring


@pytest.mark.parametrize(
    "counts",
    [OrderedDict(a=1), Counter(a=1), defaultdict(int, a=1)],
    ids=lambda kind: type(kind).__name__,
)
def test_dictionaries_of_the_standard_library(counts: Any) -> None:
    contents = Contents([counts])
    counts["a"] += 1
    copy = contents.copies()[id(counts)]
    assert type(copy) is type(counts)
    assert copy == {"a": 1}


def test_tuples_that_nothing_can_be_put_into_stay_what_they_are() -> None:
    """Modules have many, and their code may ask whether one ``is`` another."""
    sizes = ((1, 2), (3, 4))
    assert not Contents([sizes]).containers
    assert Contents([{"sizes": sizes}]).copies().popitem()[1]["sizes"] is sizes


class Meddling:
    """Puts something into the dictionary that it is in when asked for its class, as another thread
    may at any time."""

    def __init__(self, inside: dict[Any, Any]) -> None:
        self.inside = inside

    @property
    def __class__(self) -> Any:  # as `isinstance` asks
        self.inside[object()] = 1
        return Meddling


def test_nothing_comes_between_the_items_of_a_dictionary() -> None:
    counts: dict[Any, Any] = {}
    counts.update(one=Meddling(counts), two=Meddling(counts))
    assert not has_tensors([counts])
    assert Contents([counts]).is_true


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
    assert has_tensors([((torch.ones(1),),)])
    assert not has_tensors([{"list": [1]}])
