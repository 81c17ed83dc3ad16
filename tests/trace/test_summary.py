"""How busy lanes were, and what bounds a step, on timelines that can be counted by hand."""

import pytest

from roundpipe.trace.profile import Profile
from roundpipe.trace.summary import Block, gaps, merged, summarize
from roundpipe.trace.table import as_html, as_text


def block(row: str, start: int, end: int, label: str = "F0.0@0") -> Block:
    return Block(row, label, start / 1000, end / 1000, {})


def test_two_devices_and_an_optimizer() -> None:
    """Ten milliseconds: device 0 computes 6 of them, device 1 computes 2, nothing runs in one."""
    found = summarize(
        [
            block("cuda:0 compute", 0, 4),
            block("cuda:0 compute", 4, 6),
            block("cuda:1 compute", 2, 4),
            block("cuda:0 weights up", 1, 3),
            block("cuda:0 weights up", 2, 4),  # which overlaps
            block("optimizer", 6, 8, "step_fn"),
            block("optimizer", 0, 6, "wait_offloaded"),  # which is no work
            block("cuda:1 compute", 9, 10),
        ]
    )
    assert found.seconds == pytest.approx(0.010)
    assert {name: pytest.approx(share) for name, share in found.shares.items()} == {
        "compute": 0.45,
        "upload": 0.3,
        "optimizer": 0.2,
        "data": 0.1,
    }
    assert found.bound == "compute"
    assert found.rows == [
        ("cuda:0 compute", "60%", "6.0", "4.0", "4.0", "2"),
        ("cuda:0 weights up", "30%", "3.0", "7.0", "6.0", "2"),
        ("cuda:1 compute", "30%", "3.0", "7.0", "5.0", "2"),
        ("optimizer", "20%", "2.0", "8.0", "6.0", "1"),
    ]
    assert found.verdict().startswith("Bound by compute: ")


@pytest.mark.parametrize(
    ("busy", "bound"),
    [
        ([("cuda:0 compute", 0, 3), ("cuda:0 weights up", 0, 9)], "upload"),
        ([("cuda:0 compute", 0, 3), ("cuda:0 gradients down", 3, 9)], "download"),
        ([("cuda:0 compute", 0, 3), ("cuda:0 compute", 9, 10)], "data"),
    ],
)
def test_what_is_busiest_bounds_the_step(busy: list[tuple[str, int, int]], bound: str) -> None:
    assert summarize([block(*each) for each in busy]).bound == bound


def test_nothing_ran() -> None:
    empty = summarize([])
    assert (empty.bound, empty.verdict(), empty.rows) == ("nothing", "nothing ran", [])
    assert "nothing ran" in Profile().summary()
    assert "bound by nothing" in Profile()._repr_html_()


def test_times_between_times() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5), (2.5, 2.6)]) == [(0, 2.6), (3, 4)]
    assert gaps([(0, 2), (3, 4)], 0, 5) == [(2, 3), (4, 5)]
    assert gaps([], 0, 5) == [(0, 5)]


def test_tables_line_up_and_hide_nothing_of_a_name() -> None:
    rows = [("a < b", "9.5"), ("c", "10.25")]
    assert as_text(("name", "ms"), rows).splitlines() == [
        "name      ms",
        "a < b    9.5",
        "c      10.25",
    ]
    assert "a &lt; b" in as_html("of <two>", ("name", "ms"), rows)
    assert "of &lt;two&gt;" in as_html("of <two>", ("name", "ms"), rows)
