"""`make test-newest` tests with newer releases than `make test`, or fails."""

import subprocess
import sys
from pathlib import Path

import newest
import pytest


def test_what_cannot_be_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(newest, "make", lambda _: python)
    assert newest.main([str(tmp_path)]) == 1
    assert "nothing is tested with it" in capsys.readouterr().err


def test_what_is_said_to_be_newest_is_newer() -> None:
    """Else the pins of all other tests have passed by."""

    def numbers(version: str) -> list[int]:
        return list(map(int, version.split(".")))

    pins, later = newest.pinned(newest.ROOT / "constraints.txt"), newest.pinned(newest.PINS)
    assert "transformers" in pins.keys() & later.keys()
    for name in pins.keys() & later.keys():
        assert numbers(later[name]) > numbers(pins[name]), name


@pytest.mark.slow
def test_the_environment_has_all_of_this_one(tmp_path: Path) -> None:
    python = newest.make(tmp_path / "there")
    code = "import roundpipe, sys, torch; print(torch.__file__, sys.prefix)"
    beneath = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    above = subprocess.check_output([python, "-c", code], text=True).split()
    assert above == [beneath[0], str(tmp_path / "there")]
