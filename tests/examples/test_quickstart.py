"""The quickstart works on real weights and gives the same losses on any number of devices."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fetch_assets import IndexUnreachableError, smollm2_folder, wiki_summaries

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"


@pytest.fixture(scope="module", autouse=True)
def assets() -> None:
    try:
        smollm2_folder()
        wiki_summaries()
    except IndexUnreachableError as error:
        pytest.skip(str(error))


def losses_of_quickstart(output: Path, *options: str) -> list[float]:
    """Held-out loss before and after, and of the adapter reloaded with plain PEFT."""
    command = [sys.executable, str(QUICKSTART), "--steps", "4", "--output", str(output), *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    found = re.search(r"before: (\d\S+)  after: (\S+)\n.* loss is (\S+)", finished.stdout)
    assert found, finished.stdout
    return [float(loss) for loss in found.groups()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_devices_give_the_losses_of_one(tmp_path: Path) -> None:
    one = losses_of_quickstart(tmp_path / "one", "--devices", "1")
    before, after, reloaded = one
    assert after < before - 0.05
    assert reloaded == pytest.approx(after, abs=1e-4)
    assert losses_of_quickstart(tmp_path / "three", "--devices", "3") == one
