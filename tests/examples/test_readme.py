"""Every Python example of the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundpipe import RoundPipe
from roundpipe_hf import RoundPipeTrainer

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)
each = pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))


@each
def test_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where everything is imported, which takes a process of its own ten seconds."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(example, names)
    engines = [
        value.model_wrapped if isinstance(value, RoundPipeTrainer) else value
        for value in names.values()
        if isinstance(value, RoundPipeTrainer | RoundPipe)
    ]
    assert engines
    for engine in engines:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@each
def test_example_runs_in_a_process_of_its_own(example: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
