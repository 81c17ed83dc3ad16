"""One command runs many benchmarks: each by itself, none stopping the others, nothing that was
measured lost."""

import json
import shlex
from pathlib import Path

import pytest
import suite
from suite import SUITES, Row

GOOD = (
    'import sys\nprint("words")\n'
    'print(\'{"bench": "x", "tokens_per_s": 5, "given": "%s"}\' % sys.argv[1])\n'
)
FAILING = 'print(\'{"bench": "x", "value": 1}\', flush=True)\nraise SystemExit(3)\n'
ENDLESS = 'import threading\nprint(\'{"bench": "y"}\', flush=True)\nthreading.Event().wait()\n'


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("good.py", GOOD), ("failing.py", FAILING), ("endless.py", ENDLESS)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(suite, "HERE", tmp_path)
    return tmp_path


def test_rows_that_fail_or_do_not_end_leave_the_others_alone(scripts: Path) -> None:
    out = scripts / "run.jsonl"
    out.write_text('{"bench": "before"}\n')
    rows = [Row("failing.py", 60), Row("endless.py", 1), Row("good.py 'one word'", 60)]
    results = suite.run(rows, out, limit_s=100, extra=[])
    assert [result["became"] for result in results] == ["failed (3)", "stopped after 1 s", "ok"]
    assert [result["figure"] for result in results] == [1, "-", 5]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["bench"] for record in records] == ["before", "x", "y", "x"]
    assert records[-1]["given"] == "one word"


def test_the_same_command_goes_on_where_it_was_stopped(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = scripts / "run.jsonl"
    out.write_text('{"bench": "ceilings"}\n')
    monkeypatch.setitem(SUITES, "some", [Row("failing.py", 60), Row("good.py x", 60)])
    monkeypatch.setattr("sys.argv", ["suite.py", "some", "--out", str(out), "--budget-s", "50"])
    assert suite.main() == 1  # one row failed
    (scripts / "failing.py").write_text(GOOD)
    SUITES["some"][0] = Row("failing.py y", 60)
    assert suite.main() == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.get("given") for record in records] == [None, None, "x", "y"]
    assert suite.main() == 0
    assert len(out.read_text().splitlines()) == len(records), "a row was measured again"


def test_a_row_is_not_begun_without_time_for_it(scripts: Path) -> None:
    results = suite.run([Row("good.py x", 60)], scripts / "run.jsonl", limit_s=1, extra=[])
    assert results[0]["became"].startswith("not begun")


def test_every_row_names_a_script_there_is() -> None:
    for row in (row for rows in SUITES.values() for row in rows):
        assert (Path(suite.__file__).parent / shlex.split(row.command)[0]).exists(), row
