"""With ``sharded_checkpoints`` each process writes what it owns of the optimizer's state, and any
number of processes goes on from it as from the whole file."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from tests.hf.test_processes import ROWS, assert_equal_in_all_processes
from tests.support.processes import check_in_processes
from tests.support.trainers import MODELS, differ, make_trainer, run, weights

HOW: dict[str, Any] = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
}
SHARDED, WHOLE = "sharded", "whole"
FILES = {"optimizer.pt", "roundpipe_masters.pt"}


def run_from(source: str | None, folder: str, *, sharded: bool = False, **how: Any) -> Any:
    """bf16 weights, which hold less than their masters, saved after two of three steps."""
    trainer = make_trainer(
        RoundPipeTrainer,
        MODELS["full"]().bfloat16(),
        ROWS,
        output_dir=folder,
        sharded_checkpoints=sharded,
        **HOW | how,
    )
    run(trainer, **({} if source is None else {"resume_from_checkpoint": source}))
    return trainer


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights, masters and moments; trainers of one process."""
    found = weights(trainer)
    for name, master in trainer.optim_named_parameters():
        found[f"master/{name}"] = master.detach().clone()
        state = trainer.optimizer.optimizer.inner.state[master]
        found |= {f"{key}/{name}": value for key, value in state.items()}
    return found


@pytest.mark.slow
def test_two_processes_and_one_go_on_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_in_processes(two_save, tmp_path)
    alone = [state_of(run_from(f"{kind}/checkpoint-2", f"{kind}-1")) for kind in (SHARDED, WHOLE)]
    torch.testing.assert_close(*alone, atol=0, rtol=0)
    assert set(os.listdir(f"{SHARDED}-1/checkpoint-3")) >= FILES  # it wrote the whole file again
    run_from(None, "of-one", sharded=True)
    run_from(None, "of-one-whole")
    check_in_processes(two_go_on, tmp_path)


def two_save() -> None:
    """The same run twice, and its end again from either checkpoint."""
    ends = [run_from(None, kind, sharded=kind == SHARDED) for kind in (SHARDED, WHOLE)]
    names = set(os.listdir(f"{SHARDED}/checkpoint-2"))
    assert "roundpipe_optimizer" in names
    assert not names & FILES
    shards = [
        Path(f"{SHARDED}/checkpoint-2/roundpipe_optimizer/__{rank}_0.distcp").stat().st_size
        for rank in range(2)
    ]
    assert min(shards) > 0.3 * max(shards)
    ends += [
        run_from(f"{kind}/checkpoint-2", f"again-{kind}", sharded=True) for kind in (SHARDED, WHOLE)
    ]
    for end in ends[1:]:
        assert differ(weights(end), weights(ends[0])) == []
    assert_equal_in_all_processes(weights(ends[0]))


def two_go_on() -> None:
    ends = [run_from(f"{of}/checkpoint-2", f"{of}-by-two") for of in ("of-one", "of-one-whole")]
    assert differ(*map(weights, ends)) == []


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_from(None, "saved", sharded=True)
    shutil.copytree("saved/checkpoint-2", "cut")
    os.truncate("cut/roundpipe_optimizer/__0_0.distcp", 100)
    for refused in (
        partial(run_from, "cut", "out"),
        partial(run_from, "saved/checkpoint-2", "out", optim="sgd"),
    ):
        with pytest.raises(ConfigError, match=r"has 100 bytes|has the state of AdamW"):
            refused()


def test_a_trace_and_shards_are_the_trainers_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that came in an engine has them, too, and was said not to."""
    from roundpipe import RoundPipe

    engine = RoundPipe(MODELS["full"](), devices=1)
    make_trainer(
        RoundPipeTrainer,
        engine,
        ROWS,
        output_dir=str(tmp_path),
        trace_dir=str(tmp_path),
        sharded_checkpoints=True,
    )
    assert "no effect" not in caplog.text
    engine.close()
