"""The library of ``update.c`` and its headers, compiled once per machine with the system's
compiler.

Without a compiler the one that wheels bring is loaded, which knows no processor in particular.
Where there is none either ``library()`` is None and updates run on torch's kernels, chunk by chunk.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_log = logging.getLogger("roundpipe")
_SOURCE = Path(__file__).with_name("update.c")
_SOURCES = (_SOURCE, *(_SOURCE.with_name(name) for name in ("lean.h", "numbers.h")))
# Made by tools/package.py, and in wheels only.
_PREBUILT = _SOURCE.with_name(f"update-{platform.machine()}.so")
_OF_THE_THIRD_LEVEL = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_ROOM_BYTES = 1 << 18  # that a kernel and all measurements take at most
# No contraction and no reassociation, because results are to be the same on every machine.
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None, said once, if this machine cannot make it."""
    try:
        kernel = ctypes.CDLL(str(_kernel_file()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning(
            "optimizers run on torch's kernels, which are slower: update.c was not compiled (%s)",
            reason,
        )
        return None
    kernel.roundpipe_update.argtypes = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 2)
    kernel.roundpipe_update.restype = None
    return kernel


def is_prebuilt(kernel: ctypes.CDLL) -> bool:
    return Path(kernel._name) == _PREBUILT


def _kernel_file() -> Path:
    try:
        return _compiled(cache_folder() or Path(tempfile.mkdtemp(prefix="roundpipe-")))
    except (OSError, subprocess.SubprocessError):
        if not (_PREBUILT.is_file() and runs_prebuilt(processor())):
            raise
        return _PREBUILT


def runs_prebuilt(description: str) -> bool:
    """Says whether a processor, as ``processor()`` describes it, has what tools/package.py has
    compiled for: any aarch64, or x86-64 of the third level."""
    has = set(description.replace(":", " ").split())
    return platform.system() == "Linux" and (
        platform.machine() != "x86_64" or has.issuperset(_OF_THE_THIRD_LEVEL)
    )


def _compiled(folder: Path) -> Path:
    """Its path in ``folder``. Processes that compile at the same time each put a whole file in
    place."""
    compiler = compiler_path()
    if compiler is None:
        raise FileNotFoundError("no cc, gcc or clang on the path")
    identity = "\n".join((*map(Path.read_text, _SOURCES), *_FLAGS, compiler, processor()))
    target = folder / f"update-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as building:
            made = Path(building) / "update.so"
            command = [compiler, *_FLAGS, "-pthread", str(_SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(target)
    return target


def compiler_path() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def wanted_folder() -> Path:
    """Where the user's cache keeps what RoundPipe has made once for this machine. A user without a
    home, as containers have them, gets a folder that cannot be made."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundpipe"
    except RuntimeError:
        return Path(os.devnull) / "roundpipe"


def cache_folder() -> Path | None:
    """The same, made if need be; None in a home that cannot be written to, in which each process
    compiles for itself."""
    folder = wanted_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def has_room(folder: Path) -> bool:
    """Says whether what is made for this machine can be kept there: its disk may be full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
            file.flush()
    except OSError:
        return False
    return True


def processor() -> str:
    """What -march=native depends on: a home may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    except OSError:
        return platform.processor() + platform.machine()
