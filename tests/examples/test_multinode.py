"""Two processes run the example with the losses of one, and go on where they have stopped."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT
from tests.support.processes import check_in_processes


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    for count in (1, 2):
        check_in_processes(stops_and_goes_on, tmp_path, count)
    alone, together = (torch.load(tmp_path / f"losses-{count}") for count in (1, 2))
    assert len(alone) == 6
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-6, rtol=1e-6)


def stops_and_goes_on() -> None:
    path = ROOT / "examples/multinode/train.py"
    spec: Any = importlib.util.spec_from_file_location("train", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    count = os.environ["WORLD_SIZE"]
    flags = ["--virtual", "2", "--checkpoint", f"state-{count}", "--steps"]
    losses = example.main([*flags, "3"]) + example.main([*flags, "6"])
    if os.environ["RANK"] == "0":
        torch.save(losses, f"losses-{count}")
