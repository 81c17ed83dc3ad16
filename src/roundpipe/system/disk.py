"""Room on the disk that a file is to be written to."""

import errno
import shutil
import sys
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Less is none: what is written comes in larger pieces.
_ALMOST_NONE = 2**20


def free_bytes(path: Path) -> int:
    """Counts what is free on the disk that ``path`` is on, or will be; no limit where that is not
    counted."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else sys.maxsize  # some network file systems say 0 of 0


def is_full(error: BaseException | None, path: Path) -> bool:
    """Tells whether something was not written because the disk of ``path`` is full. Call it before
    what was written is removed: some libraries' errors do not say why they could not write."""
    while error is not None:
        if getattr(error, "errno", None) in _FULL or "os error 28" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return free_bytes(path) < _ALMOST_NONE
