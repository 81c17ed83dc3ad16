"""Makes an environment with the releases of constraints-newest.txt, and with everything else from
the one this runs in.

python tools/newest.py .venv/newest   # `make test-newest` does, and runs tests there

It is an environment, rather than a folder of packages on the path, so that programs that tests
start have them too. Nothing here changes.
"""

import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints-newest.txt"


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


def pinned(constraints: Path) -> dict[str, str]:
    """Versions by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", constraints.read_text(), re.MULTILINE))


def main(arguments: Sequence[str]) -> int:
    (folder,) = arguments
    python = make(Path(folder))
    # Without dependencies, because pip would look for newer ones of what is beneath.
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(PINS)]
    if subprocess.run(command).returncode:
        print(f"error: {PINS.name} was not installed; nothing is tested with it", file=sys.stderr)
        return 1
    before = pinned(ROOT / "constraints.txt")
    for name, version in pinned(PINS).items():
        print(f"{name} {version} (constraints.txt: {before.get(name, 'none')})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
