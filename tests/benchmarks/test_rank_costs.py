"""Ranks send and keep what docs/scale-out.md says, and its table is what its formulas
give."""

import re
from typing import Any

import pytest

from benchmarks import rank_costs
from tests.support import ROOT

PAGE = ROOT / "docs/scale-out.md"


def test_the_pages_table_is_that_of_its_formulas() -> None:
    rows = re.findall(r"^\| \d+ \| \d+ GB .*\|$", PAGE.read_text(), re.MULTILINE)
    assert rows == rank_costs.table(7e9, 2, 60.0, 5.0, 25.0)


def test_the_pages_bytes_per_parameter_are_those_of_its_formula() -> None:
    """`12 bytes per parameter in one process, 7 in two, 4.5 in four and 2.6 in sixteen`."""
    said = {1: "12", 2: "7", 4: "4.5", 16: "2.6"}
    for count, text in said.items():
        assert f"{rank_costs.state_bytes(1, count, weight_bytes=2):.2g}" == text
    assert all(f"{text} " in PAGE.read_text() for text in said.values())


def test_a_larger_group_sends_more_and_is_less_efficient() -> None:
    """And accumulation, which computes longer for the same bytes, makes up for it."""
    sent = [rank_costs.sent_bytes(1e9, count, weight_bytes=2) for count in (1, 2, 64)]
    assert sent == [0.0, 3e9, 6e9 * 63 / 64]
    assert rank_costs.efficiency(60, 20, 1) == (0.75, 1.0)
    assert rank_costs.efficiency(10, 20, 5) == (1 / 3, 0.4)


@pytest.mark.slow
def test_two_hosts_send_what_the_formula_says() -> None:
    """Across a link of 200 Mbit/s. Beside the tensors there are headers, less than a twentieth, and
    short messages; the link is what a step waits for at least."""
    why = rank_costs.why_no_namespaces()
    if why is not None:
        pytest.skip(why)
    shape: dict[str, Any] = {"layers": 8, "width": 512, "steps": 3, "dtype": "float32"}
    found = rank_costs.traffic("200mbit", shape)
    formula = found["formula_bytes"]
    assert formula == 8 * 8 * 512 * 512 / 2
    assert formula < found["sent_bytes"][0] <= found["sent_bytes"][1] < 1.05 * formula + 20_000
    # What the link lets through at once at first, and what is on its way, is not waited for.
    assert found["step_s"] > 0.8 * formula / (200e6 / 8)
    assert found["weights_apart"] <= 1e-6


@pytest.mark.slow
def test_ranks_keep_what_the_formula_says() -> None:
    """Against one process, because what each keeps besides is the same. Within the largest
    parameter and what allocators keep."""
    shape: dict[str, Any] = {"layers": 32, "width": 1024, "steps": 2, "dtype": "bfloat16"}
    one, two, four = rank_costs.memory([1, 2, 4], shape)
    assert one["anonymous"] > one["formula"] == 12 * 32 * 1024**2
    for row in (two, four):
        slack = 12 * 1024**2 + 0.01 * one["formula"]
        assert abs(row["saved"] - row["saved_by_formula"]) < slack, (one, row)
