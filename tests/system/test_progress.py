"""Bars are for people who wait."""

import io
import sys
import threading

import pytest

from roundpipe.system import progress as room
from roundpipe.system.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal, True), (io.StringIO, False)])
def test_bars_are_shown_in_terminals_only(
    stream: type[io.StringIO], is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = stream()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(room, "_WORTH_A_BAR_S", 0)
    before = threading.active_count()
    assert list(progress(range(3), desc="Counting", mininterval=0)) == [0, 1, 2]
    assert ("Counting" in written.getvalue()) is is_shown
    assert is_shown or threading.active_count() == before


def test_what_is_short_has_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    assert list(progress(range(3), desc="Counting")) == [0, 1, 2]
    assert "Counting" not in written.getvalue()
