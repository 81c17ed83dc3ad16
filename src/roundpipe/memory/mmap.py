"""Which tensors lie in a file that is mapped into this process: nobody has read or copied them as a
whole."""

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

_MAPS = Path("/proc/self/maps")
_DELETED = " (deleted)"


class FileMapping(NamedTuple):
    """A stretch of addresses that shows a file."""

    start: int
    end: int
    path: str


class FileMappings:
    """This process's file mappings as they were when it was made. Empty on systems that do not tell
    them."""

    def __init__(self, mappings: Iterable[FileMapping]) -> None:
        self._mappings = sorted(mappings)
        self._starts = [mapping.start for mapping in self._mappings]

    @classmethod
    def now(cls) -> "FileMappings":
        return cls(_parse(_MAPS.read_text()) if _MAPS.exists() else ())

    def file_of(self, tensor: torch.Tensor) -> str | None:
        """The file that all of the tensor's bytes lie in, if there is one. Without bytes it lies
        nowhere."""
        start = tensor.data_ptr()
        found = bisect_right(self._starts, start) - 1
        if found < 0 or tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        mapping = self._mappings[found]
        return mapping.path if start + tensor.nbytes <= mapping.end else None


def can_tell_mappings() -> bool:
    """Whether the system says which files are mapped."""
    return _MAPS.exists()


def _parse(maps: str) -> Iterable[FileMapping]:
    """Lines like ``7f00-7f80 rw-p 00000000 08:01 1234   /path/to file``; mappings without a file
    have no path."""
    for line in maps.splitlines():
        addresses, *_, path = [*line.split(maxsplit=5), ""][:6]
        if path.startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            # A file that was replaced since is still mapped, under a name that says so.
            yield FileMapping(start, end, path.removesuffix(_DELETED))
