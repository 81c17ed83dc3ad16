"""The benchmarks of correctness and memory say what they find, on a toy model."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loss_curve
import measure
import optimizer
import preference
import preference_speed
import pytest
import ranks
import torch
from max_length import Attempts, longest

from roundpipe.engine import generation
from roundpipe.kernels import native


@pytest.fixture
def threads() -> Iterator[str]:
    """What benchmarks set for the whole process is set back."""
    before = torch.get_num_threads()
    yield str(before)
    torch.set_num_threads(before)


def test_losses_are_those_of_plain_training(
    threads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["loss_curve.py", "--tiny", "--steps", "3", "--threads", threads]
    )
    assert loss_curve.main() == 0
    at_steps, held_out, *by_itself = measure.parse_records(capsys.readouterr().out)
    assert at_steps["losses"] == pytest.approx(at_steps["losses_plain"], rel=0.005)
    assert len(at_steps["losses"]) == 3
    assert 0 <= held_out["value"] < held_out["limit"]
    assert [0 < record["value"] < held_out["limit"] for record in by_itself] == [True, True]


def test_a_rollout_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It once ran for minutes without a word. Weights that pass are counted, and the bound is made
    of them."""
    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    monkeypatch.setattr(generation, "_OF_FREE", 0.0)
    rates = {"H2D": 1e-3, "D2H": 1e-3, "memory": 1e9, "bf16 matmul": 1e9}
    monkeypatch.setattr(preference_speed, "measured_rates", lambda: rates)
    sizes = "--tiny --methods lora --prompt 8 --rows 8 --length 32 --warmup 0 --steps 1"
    monkeypatch.setattr(sys, "argv", ["preference_speed.py", "grpo", *sizes.split()])
    assert preference_speed.main() == 0
    printed = capsys.readouterr().out
    for what in ("the copy is made", "token 1 ", "token 17", "done"):
        assert f"rollout 1: {what}" in printed
    (record,) = measure.parse_records(printed)
    passing = (32 - 8) * record["streamed_gb_per_token"] / rates["H2D"]
    assert record["rollout_bound_s"] > passing > 0
    assert record["step_s"] == pytest.approx(record["rollout_s"] + record["update_s"], rel=1e-3)


@pytest.mark.skipif(native.library() is None, reason="no C compiler")
def test_the_optimizers_pass_is_timed_against_others(
    threads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--threads", threads, "--millions", "1", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["optimizer.py", *arguments])
    optimizer.main()
    found = {
        record["what"]: record["value"] for record in measure.parse_records(capsys.readouterr().out)
    }
    assert {"triad of the same mix", "torch: cast, fused AdamW, cast", "one pass"} <= found.keys()
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        (92160, (90112, 94208)),
        (100_000, (98304, 102400)),
        (32768, (32768, 36864)),
        (5000, (4096, 8192)),
    ],
)
def test_the_longest_length_is_found_to_the_resolution(limit: int, found: tuple[int, int]) -> None:
    assert longest(lambda length: length <= limit, start=32768, resolution=4096) == found


def test_a_search_ends_where_nothing_passes_and_when_time_is_up() -> None:
    assert longest(lambda length: False, start=32768, resolution=4096) == (0, 4096)
    answers: dict[int, bool | None] = {100: True, 200: False}
    assert longest(answers.get, start=100, resolution=10) == (100, 200)


class Fake:
    """An engine with memory for 1,000 tokens, whose plan for long ones is right at the second
    attempt."""

    execute_plan = "a plan"

    def __init__(self) -> None:
        self.tried: list[int] = []

    def step(self, tokens: torch.Tensor) -> None:
        self.tried.append(tokens.shape[1])
        if tokens.shape[1] > 1000 or (
            self.tried.count(tokens.shape[1]) == 1 and tokens.shape[1] > 500
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def synchronize(self) -> None: ...

    def zero_grad(self) -> None: ...


def test_an_attempt_that_ran_out_of_memory_is_made_again_and_then_given_up() -> None:
    engine = Fake()
    trained: Any = SimpleNamespace(engine=engine, step=engine.step)
    attempts = Attempts(trained, 10, Namespace(steps=1, limit_s=100))
    assert [attempts.passes(length) for length in (400, 800, 1600)] == [True, True, False]
    assert [len(attempt["errors"]) for attempt in attempts.made] == [0, 1, 3]
    assert engine.tried == [400, 800, 800, 1600, 1600, 1600]
    assert Attempts(trained, 10, Namespace(steps=1, limit_s=-1)).passes(400) is None


def test_the_reward_of_sums_is_for_the_answer_and_the_end_of_its_line() -> None:
    completions = [" 7\nFor", "7\n", " 7", " 7 is\n", " 17\n", "\n7\n"]
    rewards = preference.is_the_sum(completions, answer=["7"] * len(completions))
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_ranks_train_on_the_rows_of_one_process() -> None:
    """Losses in bf16, whose gradients are rounded once in each process."""
    script = str(Path(ranks.__file__))
    row = ["--tiny", "--steps", "2", "--warmup", "1", "--modes", "sync", "--threads", "2"]
    done = subprocess.run(
        [sys.executable, script, *row], stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0
    alone, *together = measure.parse_records(done.stdout)
    assert [one["processes"] for one in together] == ["2", "2, sums in the step"]
    for one in together:
        assert one["tokens_per_s"] > 0
        assert one["loss_last"] < one["loss_first"]
        for loss in ("loss_first", "loss_last"):
            assert one[loss] == pytest.approx(alone[loss], rel=0.01)
