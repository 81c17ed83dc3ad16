"""``optimizer_state_dir`` changes no loss and no weight of a Trainer's run, resumed from a
checkpoint or not; runs share a folder, and leave nothing in it."""

from pathlib import Path
from typing import Any

import pytest

from roundpipe.memory import state_file
from roundpipe.memory.state_file import StateFile
from roundpipe.step import state_pages
from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    assert_same,
    logged,
    make_trainer,
    run,
    token_rows,
    train_both,
    weights,
)

ROWS = token_rows(12)
SETTINGS: dict[str, Any] = {
    "devices": 3,
    "learning_rate": 1e-3,
    "optim": "adamw_torch",
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_run_and_its_resumption(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "LEAST_BYTES", 1)  # because the model is tiny
    monkeypatch.setattr(state_pages, "LEAST_BYTES", 1)
    monkeypatch.setattr(state_pages, "free_host_bytes", lambda: 0)
    folder = tmp_path / "state"
    made = []
    for name, settings in (("memory", {}), ("disk", {"optimizer_state_dir": str(folder)})):
        settings |= SETTINGS | {"async_optimizer": is_async, "output_dir": name}
        trainer = run(make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, **settings))
        resumed = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, **settings)
        run(resumed, resume_from_checkpoint=f"{name}/checkpoint-2")
        made.append([(logged(each), weights(each)) for each in (trainer, resumed)])
        if name == "disk":
            memories = {type(m.memory) for m in resumed.model_wrapped.optim_parameters()}
            assert memories == {StateFile}
    assert list(folder.iterdir()) == []
    for (log, ours), (other_log, others) in zip(*made, strict=True):
        assert [entry.get("loss") for entry in log] == [entry.get("loss") for entry in other_log]
        assert ours.keys() == others.keys()
        assert all(ours[key].equal(others[key]) for key in ours)


def test_it_is_the_plain_trainer(tmp_path: Path) -> None:
    assert_same(train_both(MODELS["full"], ROWS, optimizer_state_dir=str(tmp_path / "state")))
