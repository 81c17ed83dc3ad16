"""Imports go one way, so that a part can be understood, and tested, without what is built on it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src"

# Left to right: a part imports from its own group and from those left of it.
GROUPS = [
    {"errors", "trace", "slot_sizes", "control_groups"},
    {"device", "memory"},
    {"params", "plan", "microbatch", "packed", "chunked_loss", "loss_kernel"},
    {"runtime", "optim"},
    {
        "config",
        "forwarding",
        "budget",
        "priors",
        "planner",
        "leftover",
        "profiling",
        "batches",
        "backward_round",
        "host",
        "engine",
        "model",
        "parts",
        "auto",
        "wrap",
        "presets",
        "checkpoint",
    },
    {"roundpipe"},  # the public names, in its __init__.py
    {"roundpipe_hf"},
]
RANK = {part: rank for rank, group in enumerate(GROUPS) for part in group}


class Import(NamedTuple):
    """One name that one file asks for; ``local`` when only a function's body does, so not at import time."""

    file: Path
    line: int
    name: str
    local: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(SRC)}:{self.line} imports {self.name}"


def part_of(dotted: str) -> str | None:
    """The part that an absolute name belongs to; None for other packages."""
    package, *path = dotted.split(".")
    if package == "roundpipe" and path:
        is_module = (SRC / package / path[0]).is_dir() or (SRC / package / f"{path[0]}.py").is_file()
        return path[0] if is_module else package
    return package if package in ("roundpipe", "roundpipe_hf") else None


def home_of(file: Path) -> str:
    """The part that a file of ours belongs to."""
    part = part_of(".".join(name for name in file.relative_to(SRC).with_suffix("").parts if name != "__init__"))
    assert part in RANK, f"{file} belongs to {part!r}, which has no place in GROUPS yet"
    return part


def python_files(package: str = "") -> list[Path]:
    return sorted((SRC / package).rglob("*.py"))


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The tree without the bodies of ``if TYPE_CHECKING:``."""
    yield node
    skipped = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from run_time_nodes(child)


def imports_in(file: Path) -> Iterator[Import]:
    """Every import that can happen at run time, lazy ones included; names for the type checker bind nothing."""
    package = list(file.relative_to(SRC).parent.parts)
    tree = ast.parse(file.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    in_functions = {id(node) for function in functions for node in ast.walk(function)}
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        yield from (Import(file, node.lineno, name, id(node) in in_functions) for name in names)


def all_imports(package: str = "") -> list[Import]:
    return [found for file in python_files(package) for found in imports_in(file)]


def mentions_of(file: Path, dotted: str) -> list[int]:
    """Lines of code, not of comments or strings, that use or import ``dotted``, a name like ``torch.cuda``."""
    used = [
        n.lineno
        for n in ast.walk(ast.parse(file.read_text()))
        if isinstance(n, ast.Attribute) and ast.unparse(n) == dotted
    ]
    return used + [found.line for found in imports_in(file) if f"{found.name}.".startswith(f"{dotted}.")]


@pytest.mark.parametrize("file", python_files(), ids=lambda file: str(file.relative_to(SRC)))
def test_imports_go_left(file: Path) -> None:
    own = RANK[home_of(file)]
    wrong = [found for found in imports_in(file) if (part := part_of(found.name)) and RANK[part] > own]
    assert not wrong, "\n".join(map(str, wrong))


def test_parts_do_not_import_each_other_in_circles() -> None:
    needs: dict[str, set[str]] = {part: set() for part in RANK}
    for found in all_imports():
        own, other = home_of(found.file), part_of(found.name)
        if other and own != other:
            needs[own].add(other)
    free: set[str] = set()
    while ready := {part for part in needs.keys() - free if needs[part] <= free}:
        free |= ready
    circle = {part: sorted(needs[part] - free) for part in needs.keys() - free}
    assert not circle


def test_plan_is_pure() -> None:
    """Only plan/measure.py may know that devices exist."""
    for file in python_files("roundpipe/plan"):
        if file.name == "measure.py":
            continue
        assert not [found for found in imports_in(file) if part_of(found.name) in ("device", "memory")], file
        assert not mentions_of(file, "torch.accelerator"), file


def test_runtime_carries_out_and_never_partitions() -> None:
    assert not [str(found) for found in all_imports("roundpipe/runtime") if "plan.partition" in found.name]


def test_only_device_and_memory_say_torch_cuda() -> None:
    others = [f for f in python_files() if home_of(f) not in ("device", "memory")]
    wrong = {str(f.relative_to(SRC)): lines for f in others if (lines := mentions_of(f, "torch.cuda"))}
    assert not wrong


def test_only_presets_know_the_hugging_face_libraries() -> None:
    libraries = ("transformers", "accelerate", "peft", "trl", "datasets")
    foreign = [found for found in all_imports("roundpipe") if found.name.split(".")[0] in libraries]
    wrong = [found for found in foreign if home_of(found.file) != "presets" and not found.local]
    assert not wrong, "\n".join(map(str, wrong))


def test_importing_the_engine_loads_no_transformers_starts_no_thread_and_touches_no_device() -> None:
    program = (
        "import sys, threading, torch, roundpipe, roundpipe.optim\n"
        "assert 'transformers' not in sys.modules\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
