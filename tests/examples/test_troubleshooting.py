"""The troubleshooting guide has the places that errors name, and texts that are still said."""

import ast
import re
from pathlib import Path

import pytest

import roundpipe
from roundpipe.errors import RoundPipeError
from roundpipe_hf.errors import UnknownModelCall
from tests.support import ROOT

GUIDE = ROOT / "docs/troubleshooting.md"
HEADINGS = re.findall(r"^#+ (.*)$", GUIDE.read_text(), flags=re.MULTILINE)
ANCHORS = {heading.lower().replace(" ", "-") for heading in HEADINGS}
KINDS = [RoundPipeError, *RoundPipeError.__subclasses__(), UnknownModelCall]


def texts_in(file: Path) -> list[str]:
    constants = (node for node in ast.walk(ast.parse(file.read_text())))
    return [
        node.value
        for node in constants
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_names_a_place_that_there_is(kind: type[RoundPipeError]) -> None:
    """In a note, so that its own text stays what it was, also in a process that it was sent to."""
    error = kind("what is wrong")
    assert str(error) == "what is wrong"
    [note] = error.__notes__
    named, anchor = re.fullmatch(r"what to do: (.*)#(.*)", note).groups()  # type: ignore[union-attr]
    assert ROOT / named == GUIDE
    assert anchor in ANCHORS


def test_an_error_keeps_one_note_when_it_is_sent_elsewhere() -> None:
    import pickle

    sent = pickle.loads(pickle.dumps(roundpipe.ConfigError("what is wrong")))
    assert sent.__notes__ == roundpipe.ConfigError("what is wrong").__notes__


def test_every_text_of_the_guide_is_said_somewhere() -> None:
    """Else a reworded error is no longer found in it."""
    table = GUIDE.read_text().split("## By error text")[1]
    listed = re.findall(r"^\| `(.*?)` \|", table, flags=re.MULTILINE)
    said = "\n".join(text for file in (ROOT / "src").rglob("*.py") for text in texts_in(file))
    assert len(listed) > 40
    assert not [text for text in listed if text not in said]
