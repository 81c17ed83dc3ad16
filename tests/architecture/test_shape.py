"""`make shape` counts what it says, and prints the target beside each number."""

import ast
from pathlib import Path

import pytest
import shape

MODULE = '''"""Says what is here."""

# A comment.
def choose(a, b):
    """Docstring of
    two lines."""
    for one in a:
        if one and b:
            return one
    return [x for x in b if x] or None


NAMES = """
a string is code
"""
'''

PAGE = """# Architecture

## The words

* *slot*: a buffer
* *stage run*: one stage

| WIDE | a row of a table |

## Three stories

**One weight** goes from `memory/pinning.py` through `runtime/executor.py` and
`memory/pinning.py` to `memory/pinning.py`.

**One gradient** passes `kernels/update.c`.

## Internals

`engine/batches.py` is in no story.
""".replace("WIDE", "x" * 100)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    room = tmp_path / "src" / "roundpipe" / "memory"
    room.mkdir(parents=True)
    (room / "pinning.py").write_text(MODULE)
    (room / "wide.c").write_text("// " + "x" * 98 + "\n")
    (room.parent / "errors.py").write_text("")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text(PAGE)
    return tmp_path


def test_counts_of_a_small_project(project: Path) -> None:
    found = {count.what.strip(): count for count in shape.counts(project)}
    numbers = {what: count.number for what, count in found.items()}
    assert numbers["lines in src"] == 16
    assert numbers["of them Python code: no blanks, comments, docstrings"] == 8
    assert numbers["files in the largest room"] == 2
    assert numbers["modules at the top of roundpipe/"] == 1
    assert numbers["lines over 100 columns"] == 1
    assert numbers["words of docs/architecture.md"] == len(PAGE.split())
    assert numbers["its longest line, tables left out"] < 100
    assert numbers["terms in its glossary"] == 2
    assert numbers["One weight: files"] == 2
    assert numbers["One weight: returns to a file left before"] == 1
    assert numbers["One gradient: files"] == 1
    assert str(found["lines over 100 columns"]).endswith("not met")
    assert "< 20,000" in str(found["lines in src"])


def test_complexity_is_that_of_mccabe() -> None:
    tree = ast.parse(MODULE)
    # One, the loop, the `if`, its `and`, the comprehension, its `if`, the `or`.
    assert [shape.complexity(function) for function in tree.body[1:2]] == [7]  # type: ignore[arg-type]
    assert shape.branching([tree]) == pytest.approx(100 * 7 / 7)


def test_a_function_inside_another_counts_for_itself() -> None:
    tree = ast.parse(
        "def outer():\n    def inner(x):\n        return x or 0\n    try:\n        return inner\n"
        "    except ValueError:\n        return None\n"
    )
    assert shape.branching([tree]) == pytest.approx(100 * (2 + 2) / 7)
