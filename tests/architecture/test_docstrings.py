"""Every public name says what it does, what its parameters are, and which of our errors it
raises."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import roundpipe
import roundpipe.errors
import roundpipe.optim
import roundpipe.presets
import roundpipe.testing
import roundpipe_hf
import roundpipe_hf.accelerate
import roundpipe_hf.sft
from roundpipe.device.protocol import Device

NAMES: dict[ModuleType, list[str]] = {
    roundpipe: roundpipe.__all__,
    roundpipe.errors: [
        name
        for name, kind in vars(roundpipe.errors).items()
        if inspect.isclass(kind) and issubclass(kind, BaseException)
    ],
    roundpipe.optim: roundpipe.optim.__all__,
    roundpipe.presets: ["Cut", "register_preset"],
    roundpipe.testing: ["AdversarialDevice"],
    roundpipe_hf: roundpipe_hf.__all__,
    roundpipe_hf.accelerate: ["RoundPipeAccelerator"],
    roundpipe_hf.sft: roundpipe_hf.sft.__all__,
}
ERRORS = set(NAMES[roundpipe.errors])
# Methods that are described where they are asked for.
PROTOCOLS = {"AdversarialDevice": Device, "VirtualDevice": Device}
FRAGMENTS = ("What", "Whether", "Of", "How", "Where", "Which")


class Public(NamedTuple):
    """A public function, class or method. ``context`` is the class's docstring where it is a
    method of one, and ``inherited`` the method of a library that it overrides."""

    name: str
    function: Callable[..., Any]
    docstring: str
    context: str
    inherited: Callable[..., Any] | None

    @property
    def described(self) -> str:
        return f"{self.docstring}\n{self.context}"


def is_ours(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").split(".")[0] in ("roundpipe", "roundpipe_hf")


def plain(value: Any) -> Callable[..., Any] | None:
    """The function behind a method, class method, property or signed forward, if it is one."""
    if isinstance(value, property):
        return value.fget
    value = getattr(value, "__func__", getattr(value, "_method", value))
    return value if inspect.isfunction(value) else None


def methods_of(kind: type) -> Iterator[Public]:
    """Public methods that we have written, those of bases included, and the constructor."""
    for place, base in enumerate(kind.__mro__):
        if not is_ours(base):
            continue
        context = "\n".join(one.__doc__ or "" for one in kind.__mro__ if is_ours(one))
        for name, value in vars(base).items():
            function = plain(value)
            is_made = name == "__init__" and is_dataclass(base)
            is_public = name in ("__init__", "__post_init__") or not name.startswith("_")
            if function is None or not is_public or is_made:
                continue
            protocol = PROTOCOLS.get(base.__name__)
            above = [one for one in kind.__mro__[place + 1 :] if name in vars(one)]
            ours = [plain(vars(one)[name]) for one in above if is_ours(one)]
            docstrings = [one.__doc__ for one in (function, *ours) if one and one.__doc__]
            docstring = next(
                iter(docstrings), getattr(getattr(protocol, name, None), "__doc__", "")
            )
            if name in ("__init__", "__post_init__"):
                docstring = context
            library = [plain(vars(one)[name]) for one in above if not is_ours(one)]
            yield Public(
                f"{base.__module__}.{base.__name__}.{name}",
                function,
                docstring or "",
                context,
                next(iter(library), None),
            )


def all_public() -> dict[str, Public]:
    found: dict[str, Public] = {}
    for module, names in NAMES.items():
        for name in names:
            value = getattr(module, name)
            if inspect.isclass(value):
                key = f"{value.__module__}.{value.__name__}"
                own = vars(value).get("__doc__") or ""
                found[key] = Public(key, value, own, "", None)
                found.update({method.name: method for method in methods_of(value)})
            elif inspect.isfunction(value):
                key = f"{value.__module__}.{value.__name__}"
                function = inspect.unwrap(value)
                found[key] = Public(key, function, value.__doc__ or "", "", None)
    return found


PUBLIC = all_public()
FUNCTIONS = {name: one for name, one in PUBLIC.items() if not inspect.isclass(one.function)}


def is_in(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) is not None


@pytest.mark.parametrize("public", PUBLIC.values(), ids=PUBLIC)
def test_a_docstring_begins_with_a_whole_sentence(public: Public) -> None:
    first = inspect.cleandoc(public.docstring).partition("\n\n")[0]
    assert len(first.split()) >= 3, "it has no docstring, or one that says nothing"
    assert re.search(r"[.:]\)?$|[.:]\s", first), (
        "no sentence of the first paragraph comes to an end"
    )
    assert first.split()[0] not in FRAGMENTS, "it begins with a fragment instead of a sentence"


@pytest.mark.parametrize("public", FUNCTIONS.values(), ids=FUNCTIONS)
def test_parameters_are_named(public: Public) -> None:
    """Those that a library's method has as well are described there."""
    parameters = [
        name
        for name in inspect.signature(public.function).parameters
        if name.strip("_") not in ("self", "cls", "")
    ]
    if public.inherited is not None:
        theirs = inspect.signature(public.inherited).parameters
        parameters = [name for name in parameters if name not in (*theirs, "args", "kwargs")]
    elif public.name.endswith(".__init__"):
        parameters = [name for name in parameters if name not in ("args", "kwargs")]
    assert not [name for name in parameters if not is_in(name, public.described)]


@pytest.mark.parametrize(
    "kind",
    [one.function for one in PUBLIC.values() if is_dataclass(one.function)],
    ids=lambda kind: kind.__name__,
)
def test_fields_are_named(kind: type) -> None:
    own = [name for name in vars(kind).get("__annotations__", ()) if not name.startswith("_")]
    assert not [name for name in own if not is_in(name, kind.__doc__ or "")]


@pytest.mark.parametrize("public", FUNCTIONS.values(), ids=FUNCTIONS)
def test_errors_are_named(public: Public) -> None:
    source = textwrap.dedent(inspect.getsource(public.function))
    raised = {
        node.exc.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }
    assert not [name for name in raised & ERRORS if not is_in(name, public.docstring)]


@pytest.mark.parametrize(
    "room", [roundpipe.presets, roundpipe.testing], ids=lambda room: room.__name__
)
def test_names_that_rooms_export(room: ModuleType) -> None:
    assert room.__all__ == NAMES[room]
