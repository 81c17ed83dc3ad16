"""Memory for optimizer state in a file without a name: the disk holds it, and the page cache what
of it is in use. docs/internals/state-on-disk.md says by what reasoning.

Tensors in it are ordinary ones. Advice about their pages changes no value, because the mapping is
shared.
"""

import ctypes
import errno
import importlib
import logging
import math
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import ConfigError
from . import huge_pages
from .page_cache import PageCache

_log = logging.getLogger("roundpipe")
LEAST_BYTES = 64 << 10  # of a tensor that is worth pages of its own
FILLED_BYTES = 256 << 20
_EXTENT_BYTES = 4 << 30
_MOUNTS = Path("/proc/self/mountinfo")
_WRITE_AND_WAIT = 1 | 2 | 4  # of sync_file_range
_PUNCH = 1 | 2  # of fallocate: makes a hole and keeps the size


class Memory(Protocol):
    """Where optimizer state comes from: `huge_pages` or a `StateFile`."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


class _Extent(mmap.mmap):
    """A part of the file in memory, which begins at this address and byte of the file."""

    address: int
    offset: int


class Span(NamedTuple):
    """The bytes of one tensor, in memory and in the file. ``extent`` keeps the address from being
    given to somebody else, who would lose what he has there."""

    address: int
    offset: int
    num_bytes: int
    extent: _Extent


class _Unnamed:
    """A file without a name, which is there for as long as somebody refers to this."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor).atexit = False


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises ConfigError if no file can be written there, and makes nothing: of a folder that is
    not there, the one that it would be in is tried."""
    path = Path(_path_of(folder))
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise _not_written(str(path), error) from error


def _path_of(folder: object) -> str:
    if not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"optimizer_state_dir is {folder!r}; give the path of a folder")
    return os.path.expanduser(os.fspath(folder))


def _not_written(folder: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"optimizer_state_dir is {folder!r}, where no file can be written "
        f"({error.strerror}); name a folder on a disk that this process may write to"
    )


class StateFile:
    """Makes tensors that lie in a file of ``folder``, which is made if it is not there. Used by
    any thread.

    Raises:
        ConfigError: no file can be made and mapped there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = _path_of(folder)
        if not hasattr(mmap, "MADV_DONTFORK") or not hasattr(os, "posix_fallocate"):
            raise ConfigError(f"optimizer_state_dir is {self._folder!r}, and only Linux can do it")
        try:
            self._file = _Unnamed(self._folder)
        except OSError as error:
            raise _not_written(self._folder, error) from error
        if _is_in_memory(self._file.descriptor):
            _log.warning(
                "optimizer_state_dir is %r, which is memory by another name and saves none; name a "
                "folder on a disk",
                self._folder,
            )
        self._lock = threading.Lock()
        self._cache = PageCache()
        self._extents = weakref.WeakSet[_Extent]()
        self._newest: _Extent | None = None
        self._used = 0  # of that
        self._filled: list[Span] = []

    def __repr__(self) -> str:
        return f"<StateFile in {self._folder}: {self.num_bytes / 2**20:.1f} MiB>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A master that was pickled comes back in ordinary memory."""
        return importlib.import_module, (huge_pages.__name__,)

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        return os.fstat(self._file.descriptor).st_blocks * 512

    def refuse_lack_of(self, masters: int, moments: int) -> None:
        """Compares the disk with what is to come, in bytes. Warns if only ``moments`` do not fit,
        because who makes the optimizer may take one with fewer.

        Raises:
            ConfigError: it has no room for ``masters``.
        """
        free = self._free_bytes()
        needed = (
            f"optimizer_state_dir is {self._folder!r}, whose disk has {free} bytes free; masters "
            f"need {masters} and two moments, as AdamW keeps them, {moments} more"
        )
        if masters > free:
            raise ConfigError(f"{needed}. Name a folder on a larger one, or train fewer weights")
        if masters + moments > free:
            _log.warning(
                "%s. The first step will be refused, unless the optimizer keeps less: name a "
                "folder on a larger one, or use an optimizer with less state",
                needed,
            )

    def _free_bytes(self) -> int:
        """Of the file's disk, whatever has become of the folder."""
        return shutil.disk_usage(self._file.descriptor).free

    def _lack_of(self, num_bytes: int, why: str = "") -> ConfigError:
        return ConfigError(
            f"optimizer state needs {num_bytes} bytes more in optimizer_state_dir="
            f"{self._folder!r}, beside {self.num_bytes} that it has there, and the disk has "
            f"{self._free_bytes()} free{why}; name a folder on a larger one, or use an optimizer "
            "with less state"
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor of zeros in the file, in memory if it is small. Its space is given back
        when it is gone.

        Raises:
            ConfigError: too little disk.
        """
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < LEAST_BYTES:
            return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
        whole = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with self._lock:
                memory, span = self._take(whole)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._lack_of(whole, f" ({error.strerror})") from error
            raise
        weakref.finalize(memory, _give_back, self._file, span, os.getpid()).atexit = False
        made = torch.frombuffer(memory, dtype=dtype, count=count)
        return made.view(tuple(shape)).data  # as in huge_pages.py

    zeros = empty

    def _take(self, num_bytes: int) -> tuple[memoryview, Span]:
        if sum(span.num_bytes for span in self._filled) >= FILLED_BYTES:
            for span in self._filled:
                self.let_go(span)
            self._filled = []
        if self._newest is None or self._used + num_bytes > len(self._newest):
            self._newest, self._used = self._map(max(num_bytes, _EXTENT_BYTES)), 0
        begin, extent = self._used, self._newest
        span = Span(extent.address + begin, extent.offset + begin, num_bytes, extent)
        try:
            os.posix_fallocate(self._file.descriptor, span.offset, num_bytes)
        except OSError:
            _give_back(self._file, span, os.getpid())  # what was allocated until then
            raise
        self._used += num_bytes
        self._filled.append(span)
        return memoryview(extent)[begin : begin + num_bytes], span

    def _map(self, num_bytes: int) -> _Extent:
        offset = os.fstat(self._file.descriptor).st_size
        os.ftruncate(self._file.descriptor, offset + num_bytes)
        made = _Extent(self._file.descriptor, num_bytes, offset=offset)
        made.madvise(mmap.MADV_DONTFORK)
        huge_pages.keep_forks_from_unmapping()
        # Else a fault reads what lies before it as well, which has just been let go.
        made.madvise(mmap.MADV_SEQUENTIAL)
        made.address = torch.frombuffer(made, dtype=torch.uint8, count=1).data_ptr()
        made.offset = offset
        self._extents.add(made)
        return made

    def span_of(self, tensor: torch.Tensor) -> Span | None:
        """Where the tensor's bytes are; None if they are not in the file."""
        with torch._C.DisableTorchFunctionSubclass():  # because it is not read
            address, num_bytes = tensor.data_ptr(), tensor.nbytes
        with self._lock:
            for extent in self._extents:
                begin = address - extent.address
                if 0 <= begin < len(extent):
                    return Span(address, extent.offset + begin, num_bytes, extent)
        return None

    # Pages.

    def read(self, span: Span, offset: int, num_bytes: int, *, for_writing: bool) -> None:
        """Brings a piece of ``span`` into memory and blocks until it is there."""
        size = min(num_bytes, span.num_bytes - offset)
        self._cache.read(span.address + offset, size, for_writing=for_writing)

    def let_go(self, span: Span) -> None:
        """Writes to the disk what is newer in memory, and takes it out of memory. Blocks until
        then.

        Raises:
            OSError: it could not be written.
        """
        descriptor = self._file.descriptor
        whole = -(-span.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if _libc().sync_file_range(descriptor, span.offset, whole, _WRITE_AND_WAIT):
            code = ctypes.get_errno()
            raise OSError(code, f"writing optimizer state: {os.strerror(code)}", self._folder)
        self._cache.unmap(span.address, whole)
        os.posix_fadvise(descriptor, span.offset, whole, os.POSIX_FADV_DONTNEED)


def _give_back(file: _Unnamed, span: Span, process: int) -> None:
    """A file system that knows no holes keeps the space until the file is gone."""
    if process == os.getpid():  # a forked one must not take what is not its own
        _libc().fallocate(file.descriptor, _PUNCH, span.offset, span.num_bytes)


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_int64, ctypes.c_int64
    library.sync_file_range.argtypes = [ctypes.c_int, *where, ctypes.c_uint]
    library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, *where]
    return library


def _is_in_memory(descriptor: int) -> bool:
    """Lines like ``36 35 98:0 / /mnt rw,noatime master:1 - ext3 /dev/root rw``."""
    device = os.fstat(descriptor).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    lines = _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ()
    return any(
        line.split()[2] == name and line.partition(" - ")[2].split()[0] in ("tmpfs", "ramfs")
        for line in lines
    )
