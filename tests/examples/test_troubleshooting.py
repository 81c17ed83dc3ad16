"""The troubleshooting guide has the places that errors name, and texts that are still said."""

import ast
import re
from pathlib import Path

import pytest

import roundpipe
from roundpipe.errors import RoundPipeError
from roundpipe.forecast import explain as explaining
from roundpipe.forecast.command import run
from roundpipe.forecast.explain import explain
from roundpipe_hf.errors import UnknownModelCall
from tests.support import ROOT

GUIDE = ROOT / "docs/troubleshooting.md"
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
    found = re.fullmatch(r"what to do: (.*) explain (.*)", note)
    assert found is not None
    command, named = found.groups()
    assert command == "python -m roundpipe"
    heading = explain(named).splitlines()[0]
    assert re.sub(r"^#+ ", "", heading).lower().replace(" ", "-") == named.lower()


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


def test_a_pasted_message_or_a_few_words_of_it_find_its_row() -> None:
    pasted = "PlanError: layer 3 alone needs 3 GB of device memory, more than the 2 GB allowed"
    for text in (pasted, "alone needs", "ALONE NEEDS"):
        said = explain(text)
        assert "`alone needs`: See [PlanError](#planerror)." in said
        assert "deepspeed" not in said
    assert "doctor` says so" in explain("Two GPUs are no faster")
    assert explain("").startswith("# Troubleshooting")


def test_what_the_guide_does_not_have_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "ConfigError"]) == 0
    assert capsys.readouterr().out.startswith("### ConfigError")
    assert run(["explain", "no", "such", "text"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "the guide has nothing about 'no such text'" in err
    assert str(GUIDE) in err


def test_an_installed_package_brings_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide is found where there is no clone around it, as after `pip install` of a wheel."""
    packages = tmp_path / "lib/site-packages"
    page = tmp_path / "share/doc/roundpipe-hf/troubleshooting.md"
    (packages / "roundpipe_hf-0.1.0.dist-info").mkdir(parents=True)
    page.parent.mkdir(parents=True)
    page.write_text("# Guide\n\n### ConfigError\n\nOf a wheel.\n")
    record = packages / "roundpipe_hf-0.1.0.dist-info/RECORD"
    record.write_text("../../share/doc/roundpipe-hf/troubleshooting.md,,\n")
    (record.parent / "METADATA").write_text("Name: roundpipe-hf\nVersion: 0.1.0\n")
    monkeypatch.setattr(explaining, "__file__", str(packages / "roundpipe/forecast/explain.py"))
    monkeypatch.syspath_prepend(str(packages))
    assert explain("ConfigError") == (
        f"### ConfigError\n\nOf a wheel.\n\nPages that are named are in {page.parent}"
    )
    page.unlink()
    with pytest.raises(roundpipe.ConfigError, match="documentation is not installed"):
        explain("ConfigError")
