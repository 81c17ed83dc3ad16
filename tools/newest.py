"""Installs the newest releases of what constraints.txt pins and people have newer, in an
environment that has everything else from this one.

python tools/newest.py .venv/newest   # `make test-newest` does, and runs tests there

It is an environment, rather than a folder of packages, so that pip also finds what the newest
releases need and this one lacks. Nothing here changes.
"""

import json
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWEST = ("transformers", "trl", "peft", "accelerate")
# What those need, of which a person who installs them gets the newest too.
WITH_THEM = ("huggingface_hub", "tokenizers", "safetensors", "datasets")


class NotInstalled(Exception):
    """The newest releases are not to be had."""


def make(folder: Path) -> Path:
    """Returns the Python of the environment ``folder``, which is made if need be."""
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    beneath = folder / "lib" / version / "site-packages/beneath.pth"
    # As code, because a folder that is only named has its own .pth files left out, as those of
    # editable installs.
    beneath.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin/python"


def install(python: Path) -> None:
    """Raises NotInstalled if an index was not reached, or has none of them."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--retries", "2", "--upgrade"]
    # First by force, because without an index pip would be content with those that are there.
    for more in (["--force-reinstall", "--no-deps", *NEWEST], [*NEWEST, *WITH_THEM]):
        ran = subprocess.run([*pip, *more], capture_output=True, text=True)
        last = [line for line in ran.stderr.splitlines() if line.strip()][-1:]
        # pip looks elsewhere, and succeeds, where an index among several does not answer.
        if ran.returncode or "Retry(total=0" in ran.stderr:
            raise NotInstalled(*last)


def installed(python: Path) -> dict[str, str]:
    """Versions by name, as programs find them."""
    code = (
        "import importlib.metadata as m, json, sys; "
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    )
    command = [str(python), "-c", code, *NEWEST, *WITH_THEM]
    made: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return made


def pinned(constraints: str) -> dict[str, str]:
    """Versions by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", constraints, re.MULTILINE))


def refuse_older(found: Mapping[str, str], pins: Mapping[str, str]) -> None:
    """Raises NotInstalled if one is older than the pinned one: the newest cannot be."""
    for name in NEWEST:
        if _numbers(found[name]) < _numbers(pins[name]):
            raise NotInstalled(f"got {name} {found[name]}, and {pins[name]} is pinned")


def _numbers(version: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", version)))


def main(arguments: Sequence[str]) -> int:
    (folder,) = arguments
    try:
        python = make(Path(folder))
        install(python)
        found, pins = installed(python), pinned((ROOT / "constraints.txt").read_text())
        refuse_older(found, pins)
    except NotInstalled as error:
        print(
            f"error: the newest {', '.join(NEWEST)} cannot be installed, and nothing was tested "
            f"with them. Is there a network, and an index that has them? pip: {error}",
            file=sys.stderr,
        )
        return 1
    for name, version in found.items():
        print(f"{name} {version} (pinned: {pins[name]})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
