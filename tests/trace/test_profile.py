"""What is recorded while engines run: every action, on the device and lane that it was for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import ModelExecutePlan
from roundpipe.trace import spans
from roundpipe.trace.profile import Profile
from tests.support.device_sets import TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import make_mlp, mlp_batch

BATCH = mlp_batch(rows=6)
PLAN = ModelExecutePlan(fwd_plan=[range(4)], bwd_plan=[range(4, 7), range(4)])
DRAWN = {
    "weights up": {"UF0", "UX1", "UB2"},
    "compute": {"F0.0", "F0.1", "X1.0", "X1.1", "B2.0", "B2.1"},
    "gradients down": {"LX1", "LB2"},
}


def train(engine: roundpipe.RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    run_batch(engine, BATCH, 2, execute_plan=PLAN)
    engine.step(optimizer.step, is_async=False)
    engine.synchronize()


def test_every_action_is_drawn_once_where_it_ran(
    devices: DeviceSet, engines: Engines, tmp_path: Path
) -> None:
    engine = engines(make_mlp(), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    path = tmp_path / "spans.json"
    with roundpipe.profile(path) as profiled:
        train(engine, optimizer)
    names = [device.name for device in engine.devices]
    by_lane: dict[str, list[str]] = {}
    for block in profiled.blocks:
        device = next((name for name in names if block.row.startswith(name)), None)
        if device is not None:
            assert block.label.endswith(f"@{names.index(device)}"), "drawn in another device's row"
            by_lane.setdefault(block.row.removeprefix(f"{device} "), []).append(
                block.label.split("@")[0]
            )
        assert block.end >= block.start
    assert {lane: sorted(labels) for lane, labels in by_lane.items()} == {
        k: sorted(v) for k, v in DRAWN.items()
    }
    assert {"step_fn", "write_back", "commit"} <= {block.label for block in profiled.blocks}
    check_file(path, profiled)


def check_file(path: Path, profiled: Any) -> None:
    """The file says what the blocks say, in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = sorted(
        (rows[e["tid"]], e["name"], round(e["dur"], 3)) for e in events if e["ph"] == "X"
    )
    assert drawn == sorted(
        (b.row, b.label, round(1e6 * (b.end - b.start), 3)) for b in profiled.blocks
    )


def test_the_drawing_shows_what_ran_when() -> None:
    """Literal: three rows over ten milliseconds, a character each millisecond."""
    profiled = Profile()
    drawn = [("compute", "F0.0@0", 0, 3), ("compute", "X1.0@0", 4, 10), ("upload", "UX1@0", 1, 4)]
    for name, action, start, end in drawn:
        fields = {"device": "virtual:0", "action": Drawn(action)}
        profiled._spans.append(spans.Span(name, "worker", start / 1000, end / 1000, fields))
    profiled._spans.append(spans.Span("step_fn", "optimizer", 0.006, 0.0095, {"step": 1}))
    assert profiled.plot_timeline(10).splitlines() == [
        "                     10.0 ms",
        "optimizer            ......SSSS",
        "virtual:0 compute    FFF.XXXXXX",
        "virtual:0 weights up .UUU......",
    ]


class Drawn:
    """Stands for an action, of which only the drawing counts."""

    def __init__(self, drawing: str) -> None:
        self._drawing = drawing

    def __repr__(self) -> str:
        return self._drawing


def test_without_anything_to_draw() -> None:
    with roundpipe.profile() as profiled:
        pass
    assert (profiled.blocks, profiled.plot_timeline()) == ([], "nothing ran")


def test_profiling_ends_with_its_block_and_changes_no_number(engines: Engines) -> None:
    engine, twin = engines(make_mlp(), TWO), engines(make_mlp(), TWO)
    profiles = []

    def profile_and_raise() -> None:
        with roundpipe.profile() as profiled:
            profiles.append(profiled)
            run_batch(engine, BATCH, 2)
            engine.synchronize()
            raise ArithmeticError("the user's")

    with pytest.raises(ArithmeticError, match="the user's"):
        profile_and_raise()
    recorded = len(profiles[0].blocks)
    assert recorded
    run_batch(engine, BATCH, 2)
    for _ in range(2):
        run_batch(twin, BATCH, 2)
    TWO.check(engine_gradients(engine), engine_gradients(twin))
    assert len(profiles[0].blocks) == recorded


def test_a_listener_that_raises_is_dropped(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with one line in the log; what it listened to goes on."""
    calls = []

    def listener(span: spans.Span) -> None:
        calls.append(span)
        raise ArithmeticError("the listener's")

    engine = engines(make_mlp(), TWO)
    with spans.listen(listener):
        run_batch(engine, BATCH, 2)
        gradients = engine_gradients(engine)
    assert sorted(gradients) == sorted(name for name, _ in engine.model.named_parameters())
    assert 1 <= len(calls) <= 3, "each thread may have been telling it when it was dropped"
    assert "dropped" in caplog.text
