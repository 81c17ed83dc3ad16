"""Every test writes into a folder of its own, and leaves no engine behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.trainers import close_all


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    close_all()
