"""``trace_dir``: a timeline of a few steps of each run."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from roundpipe.errors import ConfigError
from roundpipe.forecast.command import run
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.trainer import tracing
from tests.support.trainers import MODELS, make_trainer, token_rows, trained, weights

ROWS = token_rows(12)
FILE = "steps-3-5.json"


def labels(file: Path) -> list[str]:
    return [event["name"] for event in json.loads(file.read_text())["traceEvents"]]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("devices", [1, 3])
def test_three_steps_are_recorded_and_train_as_without(
    devices: int, is_async: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {"devices": devices, "async_optimizer": is_async, "max_steps": 7}
    folder = tmp_path / "new" / "traces"
    traced = trained(RoundPipeTrainer, MODELS["full"](), ROWS, trace_dir=str(folder), **settings)
    # An update on its way before or after the three is there in part, or not at all.
    assert labels(folder / FILE).count("step_fn") in ({2, 3, 4} if is_async else {3})
    assert run(["timeline", str(folder / FILE)]) == 0
    assert "compute" in capsys.readouterr().out
    without = weights(trained(RoundPipeTrainer, MODELS["full"](), ROWS, **settings))
    assert all((value == without[name]).all() for name, value in weights(traced).items())


class Stops(TrainerCallback):
    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._after:
            raise RuntimeError("stopped")


def test_a_run_that_raises_leaves_what_it_recorded_and_listens_no_more(tmp_path: Path) -> None:
    trainer = make_trainer(
        RoundPipeTrainer, MODELS["full"](), ROWS, trace_dir=str(tmp_path), max_steps=7, devices=1
    )
    callback = Stops(after=4)
    trainer.add_callback(callback)
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert 1 <= labels(tmp_path / FILE).count("step_fn") <= 2
    trainer.remove_callback(callback)
    trainer.train()
    assert labels(tmp_path / FILE).count("step_fn") == 3


def test_a_run_too_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, tracing.__name__)
    folder = tmp_path / "traces"
    trained(RoundPipeTrainer, MODELS["full"](), ROWS, trace_dir=str(folder), max_steps=1, devices=1)
    assert "ended after step 1, before step 3" in caplog.text
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trainer = make_trainer(
        RoundPipeTrainer,
        MODELS["full"](),
        ROWS,
        trace_dir=str(tmp_path / "file" / "traces"),
        max_steps=7,
        devices=1,
    )
    with pytest.raises(ConfigError, match="trace_dir: .*cannot be written"):
        trainer.train()
    assert trainer.state.global_step == 0
