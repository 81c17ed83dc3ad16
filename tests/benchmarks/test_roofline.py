"""A step's time is told apart into what was computed and what was waited for."""

import pytest
from roofline import bounds_of, line, summary

from roundpipe.plan.actions import Action, Op, Pass, StageRun
from roundpipe.trace.profile import Block

RATES = {"bf16 matmul": 1.0, "H2D": 2.0, "D2H": 4.0, "host AdamW (torch fused)": 0.5}


def on_lane(
    lane: str, start: float, end: float, device: int = 0, pass_: Pass = Pass.FUSED
) -> Block:
    action = Action(Op.COMPUTE, StageRun(pass_, 0, range(2), device, range(2)), 0)
    return Block(
        f"cuda:{device} {lane}",
        repr(action),
        start,
        end,
        {"device": f"cuda:{device}", "action": action},
    )


def on_thread(label: str, start: float, end: float) -> Block:
    return Block("roundpipe-optimizer", label, start, end, {})


def test_time_in_which_nothing_is_computed_is_laid_to_what_else_ran() -> None:
    """
    compute    ####....####....  (of 16)
    weights up ..###...........
    optimizer  ....####......#.
    gradients  .........###..#.
    """
    blocks = [
        on_lane("compute", 0, 4),
        on_lane("compute", 8, 12),
        on_lane("weights up", 2, 5),
        on_thread("update", 4, 8),
        on_thread("wait_offloaded", 0, 16),
        on_thread("write_back", 14, 15),
        on_lane("gradients down", 9, 12),
        on_lane("gradients down", 14, 15),
    ]
    found = summary(blocks, begin=0, end=16, steps=2)
    assert found["idle_s"] == {
        "weights up": 0.5,
        "optimizer": 2.0,
        "gradients down": 0.0,
        "nothing": 1.5,
    }
    assert (found["step_s"], found["compute_s"], found["uneven_s"]) == (8, 4, 0)
    assert (found["up_s"], found["optimizer_s"], found["down_s"]) == (1.5, 2.5, 2.0)


def test_what_a_microbatch_takes_longer_than_the_fastest_of_its_stage_run_is_waiting() -> None:
    blocks = [on_lane("compute", 0, 5), on_lane("compute", 5, 7), on_lane("compute", 7, 9)]
    other = [on_lane("compute", 9, 10, pass_=Pass.BACKWARD)]
    assert summary([*blocks, *other], begin=0, end=10, steps=1)["uneven_s"] == 3


def test_work_counts_as_far_as_it_lies_between_the_first_step_and_the_last() -> None:
    blocks = [on_lane("compute", -2, 1), on_lane("compute", 3, 9), on_thread("update", -3, -1)]
    found = summary(blocks, begin=0, end=4, steps=1)
    assert (found["compute_s"], found["optimizer_s"], found["uneven_s"]) == (2, 0, 0)


def test_devices_are_averaged() -> None:
    blocks = [on_lane("compute", 0, 4), on_lane("compute", 0, 2, device=1)]
    found = summary(blocks, begin=0, end=4, steps=1)
    assert (found["compute_s"], found["idle_s"]["nothing"]) == (3, 1)


RECORD = {
    "bench": "throughput", "step_s": 10.0, "method": "full", "tokens_per_step": 10**6,
    "params": 10**6, "trainable": 10**6, "length": 0, "hidden": 8, "layers": 2,
}  # fmt: skip


def test_bounds_count_each_byte_and_operation_once() -> None:
    bounds = bounds_of(RECORD, RATES)
    assert bounds == pytest.approx(
        {"compute": 6.0, "weights up": 1e-3, "gradients down": 5e-4, "host AdamW": 2e-3}
    )
    assert bounds_of(RECORD | {"method": "LoRA"}, RATES)["compute"] == pytest.approx(4.0)
    assert bounds_of(RECORD | {"devices": 2}, RATES)["compute"] == pytest.approx(3.0)
    assert list(bounds_of(RECORD, {"H2D": 1.0})) == ["weights up"]


def test_the_line_says_what_is_known() -> None:
    assert "compute 6.000 (60%)" in line(RECORD, RATES)
    assert "weights up" not in line(RECORD | {"bench": "resident"}, RATES)
    assert "unknown" in line(RECORD, {})
    traced = {"trace": summary([on_lane("compute", 0, 4)], begin=0, end=8, steps=1)}
    assert "computing 4.000" in line(RECORD | traced, RATES)
    assert "nothing 4.000" in line(RECORD | traced, RATES)
