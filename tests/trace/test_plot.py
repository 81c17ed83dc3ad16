"""The drawing of a profile: what is where, in which colour, and what a notebook is given."""

import sys
from pathlib import Path

import pytest
import torch

import roundpipe
from roundpipe.errors import ConfigError
from roundpipe.trace import plot
from roundpipe.trace.summary import Block, read
from tests.support.device_sets import DeviceSet
from tests.support.engines import Engines, run_batch
from tests.support.models import make_mlp, mlp_batch


def block(row: str, label: str, start: int, end: int) -> Block:
    return Block(row, label, start / 1000, end / 1000, {})


TIMELINE = [
    block("cuda:10 compute", "F0.0@1", 20, 30),
    block("cuda:2 weights up", "UX1@0", 0, 2),
    block("cuda:2 compute", "X1.0@0", 2, 5),
    block("cuda:2 compute", "X1.1@0", 7, 9),
    block("optimizer", "step_fn", 9, 10),
    block("optimizer", "wait_offloaded", 0, 9),
]


def drawn_in(figure: object, height: int) -> list[tuple[tuple[float, float], object]]:
    """What was drawn in that row: from when to when, in ms, and its colour."""
    [axes] = figure.axes  # type: ignore[attr-defined]
    return [
        ((round(box.x0, 6), round(box.x1, 6)), tuple(bars.get_facecolor()[0]))
        for bars in axes.collections
        for box in (path.get_extents() for path in bars.get_paths())
        if round((box.y0 + box.y1) / 2) == height
    ]


def test_rows_stages_and_bubbles() -> None:
    """Literal: the tenth device comes after the second, and threads come last."""
    pytest.importorskip("matplotlib")
    figure = plot.figure_of(TIMELINE)
    [axes] = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "cuda:2 compute",
        "cuda:2 weights up",
        "cuda:10 compute",
        "optimizer",
    ]
    times = [[when for when, _ in drawn_in(figure, row)] for row in range(4)]
    assert sorted(times[0]) == [(0, 2), (2, 5), (5, 7), (7, 9), (9, 30)]
    assert times[1:] == [[(0, 2)], [(0, 20), (20, 30)], [(9, 10)]]
    colours = dict(drawn_in(figure, 0))
    assert colours[2, 5] == colours[7, 9] == dict(drawn_in(figure, 1))[0, 2]
    assert colours[0, 2] == colours[5, 7] == dict(drawn_in(figure, 2))[0, 20], "bubbles"
    assert colours[2, 5] != dict(drawn_in(figure, 2))[20, 30], "another stage"
    [legend] = figure.legends
    said = [text.get_text() for text in legend.get_texts()]
    assert said == ["bubble", "step_fn"]
    written = sorted((text.get_text(), *text.get_position()) for text in axes.texts)
    assert written == [
        ("F0", pytest.approx(25), 2),
        ("X1", pytest.approx(1), 1),
        ("X1", pytest.approx(5.5), 0),
    ]


def test_a_real_step_is_drawn_whole(devices: DeviceSet, engines: Engines, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    engine = engines(make_mlp(), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    with roundpipe.profile() as profiled:
        run_batch(engine, mlp_batch(rows=6), 2)
        engine.step(optimizer.step, is_async=False)
        engine.synchronize()
    figure = profiled.plot(tmp_path / "drawn.svg")
    assert "<svg" in (tmp_path / "drawn.svg").read_text()
    assert {"F", "X", "B"} & {text.get_text()[0] for text in figure.axes[0].texts}
    bars = sum(len(bars.get_paths()) for bars in figure.axes[0].collections)
    assert bars >= len([block for block in profiled.blocks if block.label != "wait_offloaded"])
    profiled.export(tmp_path / "trace.json")
    again = read(tmp_path / "trace.json")
    assert [(b.row, b.label) for b in again] == [(b.row, b.label) for b in profiled.blocks]


def test_nothing_to_draw() -> None:
    pytest.importorskip("matplotlib")
    with roundpipe.profile() as profiled:
        pass
    assert profiled.plot().axes[0].get_title(loc="left") == "0.0 ms, bound by nothing"


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'roundpipe-hf\[plot\]'"):
        plot.figure_of(TIMELINE)


def test_notebooks_show_tables(devices: DeviceSet, engines: Engines) -> None:
    engine = engines(make_mlp(), devices)
    plan = roundpipe.ModelExecutePlan(fwd_plan=[range(4)], bwd_plan=[range(4, 7), range(4)])
    with roundpipe.profile() as profiled:
        run_batch(engine, mlp_batch(rows=6), 2, execute_plan=plan)
        engine.synchronize()
    statistics = engine.statistics()
    assert statistics["layers"] == 7, "it still is a dictionary"
    table = statistics._repr_html_()  # type: ignore[attr-defined]
    assert f"<td>{statistics['working_bytes']:,}" in table.replace(' style="text-align:left"', "")
    assert all(name in table for name in statistics)
    assert "RoundPipe(" in engine._repr_html_()
    assert "layer_bytes" in engine._repr_html_()
    assert f"{plan}" in plan._repr_html_()
    for device in engine.devices:
        assert f"{device.name} compute" in profiled._repr_html_()
    engine.close()
    assert "closed" in engine._repr_html_()
