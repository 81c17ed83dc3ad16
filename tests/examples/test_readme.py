"""Every Python example of the README runs as it stands; its figures are those of the scripts."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import chart
import fits
import pytest

from roundpipe import RoundPipe
from roundpipe_hf import RoundPipeTrainer
from tests.support import ROOT

README = ROOT / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)
each = pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))


@each
def test_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where everything is imported, which takes a process of its own ten seconds."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(example, names)
    engines = [
        value.model_wrapped if isinstance(value, RoundPipeTrainer) else value
        for value in names.values()
        if isinstance(value, RoundPipeTrainer | RoundPipe)
    ]
    assert engines
    for engine in engines:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@each
def test_example_runs_in_a_process_of_its_own(example: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr


def test_it_is_short() -> None:
    assert len(README.read_text().splitlines()) < 150


def test_the_chart_is_drawn_from_its_data() -> None:
    assert chart.TARGET.read_text() == chart.draw(chart.chart())
    assert chart.TARGET.relative_to(ROOT).as_posix() in README.read_text()


def test_figures_of_the_chart_are_in_the_pages_that_they_name() -> None:
    for group in chart.chart()["groups"]:
        page, section = group["source"].split(", ", 1)
        text = (ROOT / page).read_text()
        assert section in text
        published = text[text.index(section) :]
        assert not [value for _, value, _ in group["bars"] if f"{value:,}" not in published]


@pytest.mark.parametrize(
    "rows",
    [
        fits.ROWS_OF_TABLE[:1],
        pytest.param(fits.ROWS_OF_TABLE[1:], marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
    ids=["first", "others"],
)
def test_the_table_is_what_the_planner_says(rows: list[fits.Row]) -> None:
    readme = README.read_text().splitlines()
    first = readme.index(fits.heading()[0])
    printed = readme[first : first + 2 + len(fits.ROWS_OF_TABLE)]
    assert printed[:2] == fits.heading()
    assert readme[first + len(printed)] == ""
    begin = 2 + fits.ROWS_OF_TABLE.index(rows[0])
    assert printed[begin : begin + len(rows)] == list(fits.lines(rows))
