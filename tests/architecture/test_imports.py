"""Imports go one way, so that a part can be understood, and tested, without what is built on it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).parents[2] / "src"

# From the bottom up: a room imports from those before it, and from itself. No two share a rank.
ROOMS = [
    "roundpipe.models",  # this and timer only say what to write instead
    "roundpipe.timer",
    "roundpipe.errors",
    "roundpipe.trace",
    "roundpipe.threads",
    "roundpipe.system",
    "roundpipe.device",
    "roundpipe.testing",
    "roundpipe.memory",
    "roundpipe.kernels",
    "roundpipe.quantized",
    "roundpipe.microbatch",
    "roundpipe.plan",
    "roundpipe.params",
    "roundpipe.autoplan",
    "roundpipe.step",
    "roundpipe.optim",
    "roundpipe.transfer",
    "roundpipe.recompute",
    "roundpipe.layers",
    "roundpipe.runtime",
    "roundpipe.config",
    "roundpipe.presets",
    "roundpipe.forecast",
    "roundpipe.engine",
    "roundpipe",  # the public names, in its __init__.py
    "roundpipe.__main__",
    "roundpipe_hf.errors",
    "roundpipe_hf.processes",
    "roundpipe_hf.arguments",
    "roundpipe_hf.compat",
    "roundpipe_hf.folders",
    "roundpipe_hf.quantization",
    "roundpipe_hf.files",
    "roundpipe_hf.loading",
    "roundpipe_hf.export",
    "roundpipe_hf.generation",
    "roundpipe_hf.engine",
    "roundpipe_hf.loss",
    "roundpipe_hf.trainer",
    "roundpipe_hf.trl",
    "roundpipe_hf.accelerate",
    "roundpipe_hf.sft",
    "roundpipe_hf",
]
RANK = {room: rank for rank, room in enumerate(ROOMS)}
LIMIT_AT_THE_TOP, LIMIT_PER_ROOM = 6, 14


class Import(NamedTuple):
    """One name that one file asks for; ``local`` when only a function's body does, so not at import
    time; ``for_types`` when only the type checker does."""

    file: Path
    line: int
    name: str
    local: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(SRC)}:{self.line} imports {self.name}"


def room_of(dotted: str) -> str | None:
    """The room that an absolute name belongs to; None for other packages."""
    package, *path = dotted.split(".")
    if package not in ("roundpipe", "roundpipe_hf"):
        return None
    is_module = path and (
        (SRC / package / path[0]).is_dir() or (SRC / package / f"{path[0]}.py").is_file()
    )
    return f"{package}.{path[0]}" if is_module else package


def home_of(file: Path) -> str:
    """The room that a file of ours lies in."""
    room = room_of(
        ".".join(name for name in file.relative_to(SRC).with_suffix("").parts if name != "__init__")
    )
    assert room in RANK, f"{file} belongs to {room!r}, which has no place in ROOMS yet"
    return room


def python_files(package: str = "") -> list[Path]:
    return sorted((SRC / package).rglob("*.py"))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports_in(file: Path) -> tuple[Import, ...]:
    return tuple(_imports_in(file))


def _imports_in(file: Path) -> Iterator[Import]:
    """Every import: lazy ones, and those for the type checker, are arrows of the drawing too."""
    package = list(file.relative_to(SRC).parent.parts)
    tree = tree_of(file)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    in_functions = {id(node) for function in functions for node in ast.walk(function)}
    guards = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {id(node) for guard in guards for part in guard.body for node in ast.walk(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [
                ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
            ]
        else:
            continue
        yield from (
            Import(file, node.lineno, name, id(node) in in_functions, id(node) in for_types)
            for name in names
        )


def all_imports(package: str = "") -> list[Import]:
    return [found for file in python_files(package) for found in imports_in(file)]


def mentions_of(file: Path, dotted: str) -> list[int]:
    """Lines of code, not of comments or strings, that use or import ``dotted``, a name like
    ``torch.cuda``."""
    used = [
        n.lineno
        for n in ast.walk(tree_of(file))
        if isinstance(n, ast.Attribute)
        and n.attr == dotted.rpartition(".")[2]  # unparsing every attribute takes seconds
        and ast.unparse(n) == dotted
    ]
    return used + [
        found.line for found in imports_in(file) if f"{found.name}.".startswith(f"{dotted}.")
    ]


@pytest.mark.parametrize("file", python_files(), ids=lambda file: str(file.relative_to(SRC)))
def test_imports_go_down(file: Path) -> None:
    own = RANK[home_of(file)]
    wrong = [
        found for found in imports_in(file) if (room := room_of(found.name)) and RANK[room] > own
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_files_do_not_import_each_other_in_circles_at_run_time() -> None:
    needs: dict[str, set[str]] = {}
    modules = {
        ".".join(f.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): f
        for f in python_files()
    }
    for name, file in modules.items():
        found = [one for one in imports_in(file) if not one.local and not one.for_types]
        targets = {
            one.name if one.name in modules else one.name.rpartition(".")[0] for one in found
        }
        needs[name] = {
            target
            for target in targets
            if target in modules and not f"{name}.".startswith(f"{target}.")
        }
    free: set[str] = set()
    while ready := {name for name in needs.keys() - free if needs[name] <= free}:
        free |= ready
    circle = {name: sorted(needs[name] - free) for name in needs.keys() - free}
    assert not circle


@pytest.mark.parametrize(
    "folder",
    sorted({file.parent for file in python_files()}),
    ids=lambda f: str(f.relative_to(SRC)),
)
def test_rooms_stay_small_and_say_what_is_in_them(folder: Path) -> None:
    files = [file for file in folder.iterdir() if file.suffix in (".py", ".c", ".h")]
    limit = LIMIT_AT_THE_TOP if folder == SRC / "roundpipe" else LIMIT_PER_ROOM
    assert len(files) <= limit, sorted(file.name for file in files)
    described = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert described, f"{folder} says nowhere what is in it"
    if folder.parent != SRC:
        assert "mports " in described, f"{folder}/__init__.py does not say what it may import"


def test_plan_is_pure() -> None:
    """It plans with numbers alone, and does not know that devices exist."""
    for file in python_files("roundpipe/plan"):
        allowed = ("roundpipe.plan", "roundpipe.errors", None)
        others = [found for found in imports_in(file) if room_of(found.name) not in allowed]
        # Formulas without a state: how large a slot is, and how many bytes "24GB" are.
        pure = ("roundpipe.memory.slot_sizes.", "roundpipe.system.sizes.")
        assert all(found.name.startswith(pure) for found in others), file
        assert not mentions_of(file, "torch.accelerator"), file


def test_runtime_carries_out_and_never_partitions() -> None:
    assert not [
        str(found) for found in all_imports("roundpipe/runtime") if "plan.partition" in found.name
    ]


def test_only_device_and_memory_say_torch_cuda() -> None:
    others = [
        f for f in python_files() if home_of(f) not in ("roundpipe.device", "roundpipe.memory")
    ]
    wrong = {
        str(f.relative_to(SRC)): lines for f in others if (lines := mentions_of(f, "torch.cuda"))
    }
    assert not wrong


def test_only_presets_know_the_hugging_face_libraries() -> None:
    libraries = ("transformers", "accelerate", "peft", "trl", "datasets")
    foreign = [found for found in all_imports("roundpipe") if found.name.split(".")[0] in libraries]
    wrong = [
        found for found in foreign if home_of(found.file) != "roundpipe.presets" and not found.local
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_importing_the_engine_loads_no_transformers_starts_no_thread_and_touches_no_device() -> (
    None
):
    """Nor does asking for the preset of a model that transformers has not made."""
    program = (
        "import sys, threading, torch, roundpipe, roundpipe.optim\n"
        "from roundpipe.presets import preset\n"
        "assert preset.cut(torch.nn.Linear(2, 2)) is None\n"
        "assert 'transformers' not in sys.modules\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
