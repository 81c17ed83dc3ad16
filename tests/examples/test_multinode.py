"""Two processes run the example with the losses of one, and go on where they have stopped."""

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT
from tests.support.processes import check_in_processes


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """They are started again, as torchrun does it, because the port of a group that has just ended
    is no place for another."""
    for count in (1, 2):
        for steps in (3, 6):
            check_in_processes(partial(train, steps), tmp_path, count)
    alone, together = (
        [loss for steps in (3, 6) for loss in torch.load(tmp_path / f"losses-{count}-{steps}")]
        for count in (1, 2)
    )
    assert len(alone) == 6
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--save-steps", "0"], "--save-steps is 0; give at least 1"), ([], "start it by torchrun")],
)
def test_it_says_how_to_start_it(
    flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        load_example().main(flags)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def load_example() -> Any:
    path = ROOT / "examples/multinode/train.py"
    spec: Any = importlib.util.spec_from_file_location("train", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def train(steps: int) -> None:
    count = os.environ["WORLD_SIZE"]
    losses = load_example().main(
        ["--virtual", "2", "--checkpoint", f"state-{count}", "--steps", str(steps)]
    )
    if os.environ["RANK"] == "0":
        torch.save(losses, f"losses-{count}-{steps}")
