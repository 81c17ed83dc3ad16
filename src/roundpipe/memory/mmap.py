"""Which tensors lie in a file that is mapped into this process: nobody has read or copied them as a
whole."""

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import ConfigError

_MAPS = Path("/proc/self/maps")
_DELETED = " (deleted)"


class FileMapping(NamedTuple):
    """A stretch of addresses that shows a file from its byte ``offset`` on. ``inode`` tells it
    from a file that has taken its place since."""

    start: int
    end: int
    path: str
    offset: int = 0
    inode: int = 0


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
        mapping = self.mapping_of(tensor)
        return None if mapping is None else mapping.path

    def mapping_of(self, tensor: torch.Tensor) -> FileMapping | None:
        """The mapping that all of the tensor's bytes lie in."""
        start = tensor.data_ptr()
        found = bisect_right(self._starts, start) - 1
        if found < 0 or tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        mapping = self._mappings[found]
        return mapping if start + tensor.nbytes <= mapping.end else None


def refuse_cut(mapping: FileMapping, tensor: torch.Tensor) -> None:
    """Reading behind the end of a mapped file would end the process.

    Raises:
        ConfigError: the file ends before the tensor does.
    """
    needed = mapping.offset + tensor.data_ptr() + tensor.nbytes - mapping.start
    try:
        found = Path(mapping.path).stat()
    except OSError:
        return  # because a file that was removed is there for as long as it is mapped
    if found.st_ino == mapping.inode and found.st_size < needed:
        raise ConfigError(
            f"{mapping.path} has {found.st_size} bytes, but weights are mapped up to byte "
            f"{needed}: the file was cut since the model was loaded; restore it and load the model "
            "again"
        )


def can_tell_mappings() -> bool:
    """Whether the system says which files are mapped."""
    return _MAPS.exists()


def _parse(maps: str) -> Iterable[FileMapping]:
    """Lines like ``7f00-7f80 rw-p 00000000 08:01 1234   /path/to file``; mappings without a file
    have no path."""
    for line in maps.splitlines():
        addresses, _, offset, _, inode, path = [*line.split(maxsplit=5), ""][:6]
        if path.startswith("/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            # A file that was replaced since is still mapped, under a name that says so.
            name = path.removesuffix(_DELETED)
            yield FileMapping(start, end, name, int(offset, 16), int(inode))
