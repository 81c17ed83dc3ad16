"""Counts what makes the sources quick or slow to read, each beside its target.

    python tools/shape.py [ROOT]

Reads `src` and `docs/architecture.md` and imports nothing of them. The complexity of a function is
McCabe's, one more than its branch points: `if`, conditional expressions, loops and their `else`,
`except` and the `else` of a `try`, `case`, `assert`, each `and` and `or`, each `for` and `if` of a
comprehension. It is what `radon cc` says, which is not needed to count it.
"""

import argparse
import ast
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS, LONG_FUNCTION = 100, 40
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Count(NamedTuple):
    """One number, and what it should be: `relation` and `limit` are empty where nothing is
    asked."""

    what: str
    number: float
    relation: str = ""
    limit: float = 0

    @property
    def is_met(self) -> bool:
        if not self.relation:
            return True
        return self.number < self.limit if self.relation == "<" else self.number <= self.limit

    def __str__(self) -> str:
        number = f"{self.number:,.1f}" if isinstance(self.number, float) else f"{self.number:,}"
        target = f"{self.relation} {self.limit:,}" if self.relation else ""
        return f"{self.what:<52} {number:>8}   {target:<9} {'' if self.is_met else 'not met'}"


class Story(NamedTuple):
    """The files that a tensor passes, in their order, as the architecture page tells it."""

    name: str
    files: list[str]

    @property
    def num_returns(self) -> int:
        """How often it comes back to a file that it has left."""
        return sum(
            file in self.files[:place] and file != self.files[place - 1]
            for place, file in enumerate(self.files)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    print("\n".join(map(str, counts(parser.parse_args().root))))


def counts(root: Path) -> list[Count]:
    """All counts of the project at `root`."""
    page = (root / "docs/architecture.md").read_text()
    return [*_of_sources(root / "src"), *_of_page(page), *_of_stories(stories(page))]


def _of_sources(src: Path) -> Iterator[Count]:
    files = sorted(file for kind in ("*.py", "*.c", "*.h") for file in src.rglob(kind))
    modules = {file: file.read_text() for file in files if file.suffix == ".py"}
    trees = [ast.parse(text) for text in modules.values()]
    lines = [line for file in files for line in file.read_text().splitlines()]
    yield Count("lines in src", len(lines), "<", 20_000)
    yield Count(
        "  of them Python code: no blanks, comments, docstrings",
        sum(len(code_lines(text)) for text in modules.values()),
    )
    rooms = [
        len([file for file in files if file.parent == room])
        for room in {file.parent for file in files}
        if room.parent != src
    ]
    yield Count("files in the largest room", max(rooms, default=0), "<=", 14)
    top = [file for file in modules if file.parent == src / "roundpipe"]
    yield Count("modules at the top of roundpipe/", len(top), "<=", 6)
    yield Count("complexity per 100 lines of functions", branching(trees), "<", 35)
    functions = [node for tree in trees for node in _functions(tree)]
    too_long = [function for function in functions if _length(function) > LONG_FUNCTION]
    yield Count(f"functions over {LONG_FUNCTION} lines, of {len(functions):,}", len(too_long))
    wide = [line for line in lines if len(line) > COLUMNS]
    yield Count(f"lines over {COLUMNS} columns", len(wide), "<=", 0)


def _of_page(page: str) -> Iterator[Count]:
    yield Count("words of docs/architecture.md", len(page.split()), "<=", 1_500)
    longest = max(map(len, outside_tables(page)), default=0)
    yield Count("  its longest line, tables left out", longest, "<=", COLUMNS)
    yield Count("  terms in its glossary", len(terms(page)), "<=", 20)


def _of_stories(told: Sequence[Story]) -> Iterator[Count]:
    limits = {"One gradient": (8, None), "One microbatch": (12, 8)}
    for story in told:
        num_files, num_returns = limits.get(story.name, (None, None))
        for what, number, limit in (
            ("files", len(set(story.files)), num_files),
            ("returns to a file left before", story.num_returns, num_returns),
        ):
            asked = ("<=", limit) if limit is not None else ()
            yield Count(f"{story.name}: {what}", number, *asked)


def outside_tables(page: str) -> list[str]:
    """The lines of a page that can be wrapped: a row of a Markdown table cannot."""
    return [line for line in page.splitlines() if not line.startswith("|")]


def terms(page: str) -> list[str]:
    """The terms that the architecture page defines, in its list of words."""
    return re.findall(r"^\* \*([^*]+)\*:", page, re.MULTILINE)


def stories(page: str) -> list[Story]:
    """What the page's last story section tells, a paragraph each. Files that are named without
    their path, or only meant, are not found."""
    section = page.partition("## Three stories\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\*\*([^*]+)\*\*(.*?)(?=^\*\*|\Z)", section, re.MULTILINE | re.DOTALL)
    return [Story(name, re.findall(r"`([\w/]+\.(?:py|c))`", text)) for name, text in told]


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | _Function)
        if has_docstring and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def branching(trees: Sequence[ast.AST]) -> float:
    """The complexities of all functions per 100 of their lines. A function inside another counts
    for itself, and its lines once."""
    functions = [node for tree in trees for node in _functions(tree)]
    inner = {id(each) for function in functions for each in _functions(function, inside=True)}
    num_lines = sum(_length(function) for function in functions if id(function) not in inner)
    return 100.0 * sum(map(complexity, functions)) / max(num_lines, 1)


def complexity(function: _Function) -> int:
    """McCabe's, without that of the functions inside."""
    return 1 + sum(_branches(node) for part in function.body for node in _own(part))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, _Function):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _own(child)


def _branches(node: ast.AST) -> int:
    match node:
        case ast.If() | ast.IfExp() | ast.Assert():
            return 1
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.Try() | ast.TryStar():
            return len(node.handlers) + bool(node.orelse)
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.Match():
            return sum(ast.unparse(case.pattern) != "_" for case in node.cases)
    return 0


def _functions(tree: ast.AST, inside: bool = False) -> list[_Function]:
    found = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    return [function for function in found if not inside or function is not tree]


def _length(function: _Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


if __name__ == "__main__":
    main()
