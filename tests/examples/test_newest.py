"""`make test-newest` tests with the newest releases, or fails: offline pip is content with those of
the environment beneath, which are the pinned ones."""

import subprocess
import sys
from pathlib import Path

import newest
import pytest

OFFLINE = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'refused'"


def acting(folder: Path, says: str, status: int) -> Path:
    """Acts as a Python whose pip says this, and notes in ``folder`` what it is asked for."""
    python = folder / "python"
    script = f'echo "$@" >> {folder}/asked\ncat >&2 <<"END"\n{says}\nEND\nexit {status}\n'
    python.write_text(f"#!/bin/sh\n{script}")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("says", "status"),
    [("ERROR: No matching distribution found for trl", 1), (OFFLINE, 0)],
    ids=["no index has it", "an index does not answer"],
)
def test_what_cannot_be_installed_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    says: str,
    status: int,
) -> None:
    monkeypatch.setattr(newest, "make", lambda _: acting(tmp_path, says, status))
    assert newest.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "nothing was tested with them" in error
    assert says in error


def test_an_index_may_answer_late(tmp_path: Path) -> None:
    python = acting(tmp_path, OFFLINE.replace("total=0", "total=1"), 0)
    newest.install(python)
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert first.endswith(" ".join(("--force-reinstall", "--no-deps", *newest.NEWEST)))
    assert second.endswith(" ".join(("--upgrade", *newest.NEWEST, *newest.WITH_THEM)))


def test_what_is_older_than_the_pins_is_refused() -> None:
    """An index that lags behind has no newest releases."""
    pins = newest.pinned((newest.ROOT / "constraints.txt").read_text())
    assert {*newest.NEWEST, *newest.WITH_THEM} <= pins.keys()
    newest.refuse_older(pins, pins)
    newest.refuse_older(pins | {"trl": "10.0"}, pins)
    with pytest.raises(newest.NotInstalled, match=r"got peft 0\.9\.1, and .* is pinned"):
        newest.refuse_older(pins | {"peft": "0.9.1"}, pins)


@pytest.mark.slow
def test_the_environment_has_all_of_this_one(tmp_path: Path) -> None:
    python = newest.make(tmp_path / "there")
    code = "import roundpipe, sys, torch; print(torch.__file__, sys.prefix)"
    beneath = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    above = subprocess.check_output([python, "-c", code], text=True).split()
    assert above == [beneath[0], str(tmp_path / "there")]
