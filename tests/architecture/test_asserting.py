"""Every test says what it expects: it asserts, or calls something of the tests that does."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support import ROOT

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# A method counts by these words alone: half of the helpers' methods are called as the engine's are.
EXPECTS = re.compile("assert|check|expect|^(raises|warns|fail)$")


def called_in(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def asserts_itself(function: ast.AST) -> bool:
    """Also by a process that has to end well."""
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and EXPECTS.search(node.attr))
        or (
            isinstance(node, ast.keyword)
            and node.arg == "check"
            and isinstance(node.value, ast.Constant)
            and node.value.value is True
        )
        for node in ast.walk(function)
    )


def silent_tests(sources: dict[str, str]) -> list[str]:
    """Tests without an expectation, by file and name. A helper counts by its name, wherever it
    is."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    functions = [
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    ]
    asserting = {node.name for _, node in functions if asserts_itself(node)}
    calls = [(node.name, {*called_in(node)}) for _, node in functions if node.name not in asserting]
    size = 0
    while len(asserting) > size:  # until no further helper calls one that asserts
        size = len(asserting)
        asserting |= {name for name, called in calls if asserting & called}
    return [
        f"{path}::{node.name}"
        for path, node in functions
        if node.name.startswith("test_") and node.name not in asserting
    ]


def test_every_test_expects_something() -> None:
    sources = {
        str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("*.py")
    }
    assert len(sources) > 100
    assert silent_tests(sources) == []


@pytest.mark.parametrize(
    ("body", "is_silent"),
    [
        ("engine.close()", True),
        ("assert engine.close() is None", False),
        ("pytest.raises(ValueError, engine.close)", False),
        ("devices.check(actual, expected)", False),
        ("helper()", False),
        ("idle()", True),
        ("run(command, check=True)", False),
        ("run(command, check=False)", True),
    ],
)
def test_what_counts(body: str, is_silent: bool) -> None:
    helpers = "def helper(): deeper()\ndef deeper(): assert 1\ndef idle(): return\n"
    assert bool(silent_tests({"a.py": f"{helpers}def test_it(): {body}"})) is is_silent
