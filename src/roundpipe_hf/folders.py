"""Folders of a checkpoint that are written file by file and are whole whatever happens.

[Note: killed while writing] A file of the new checkpoint is written under another name and renamed
when it is on the disk; config.json comes last. So what has its name is whole, a folder with a
config.json is complete, and without one the files that are there are gone on with.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from roundpipe.errors import ConfigError
from roundpipe.system.disk import free_bytes, is_full
from roundpipe.system.progress import progress

CONFIG = "config.json"
_MARK = "made_from"  # in the files' metadata, so that a finished folder is known again
_SPARED_BYTES = 2**28  # that stay free on the disk: other programs write there too
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

Progress = Callable[[int], Any]
"""Is told of bytes when they are written."""


class NewFolder:
    """A checkpoint's folder that is being written, or has been begun.

    Args:
        path: where it is to be.
        note: the name of a file that is there until the folder is complete.
        begun: what the note says: whatever tells this work from any other. Its "identity" is that
            in the files' `metadata`.
    """

    def __init__(self, path: Path, note: str, begun: Mapping[str, Any]) -> None:
        self.path, self._note, self._begun = path, path / note, dict(begun)
        self._shared = _lock(self._note.with_suffix(".lock"))

    @staticmethod
    def metadata(identity: str) -> dict[str, str]:
        """What safetensors files in it say of themselves: that they are of that work."""
        return {"format": "pt", _MARK: identity}

    def is_finished(self) -> bool:
        """Tells whether it is complete, and its files are of this work.

        Raises:
            ConfigError: it is, and a file is damaged or missing.
        """
        files = sorted(self.path.glob("*.safetensors")) if self.has(CONFIG) else []
        if not files or _mark_of(files[0]) != self._begun["identity"]:
            return False
        for file in files[1:]:
            _mark_of(file)
        index = self.path / SAFE_WEIGHTS_INDEX_NAME
        named = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
        missing = sorted(set(named) - {file.name for file in files})
        if missing:
            raise ConfigError(
                f"{self.path / missing[0]} is missing, which {index.name} names; empty its folder "
                "and call again"
            )
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Others that write the same folder wait, in whatever process they are: on this machine
        here, on others that share the folder when they `begin` it."""
        # Because a user may not open what another one has made among temporary files.
        user = getattr(os, "getuid", int)()
        name = hashlib.sha256(f"{user} {self.path.resolve()}".encode()).hexdigest()[:16]
        own = _lock(Path(tempfile.gettempdir()) / f"roundpipe-{name}.lock")
        _acquire(own)
        try:
            yield
        finally:
            self._shared.release()
            own.release()

    def has(self, name: str) -> bool:
        """Whether that file is there, and so is whole."""
        return (self.path / name).exists()

    def check(self) -> None:
        """Raises ConfigError if the folder holds anything but the beginning of this work."""
        # What was killed before it said what it begins has left no more than that file's beginning.
        own = {self._note.with_suffix(".part"), Path(self._shared.lock_file)}
        if not self.path.exists() or own.issuperset(self.path.iterdir()):
            return
        there = json.loads(self._note.read_text()) if self._note.exists() else None
        if there != self._begun:
            raise ConfigError(
                f"{self.path} holds {there or 'something else'}, not the beginning of "
                f"{self._begun}; name another folder or empty it"
            )

    def check_room(self, num_bytes: float) -> None:
        """Raises ConfigError if the disk has no room for that many bytes more."""
        check_room(self.path, num_bytes)

    def begin(self) -> None:
        """Makes the folder, unless it is there, waits for another machine that writes it, and says
        in it what it will be.

        Raises:
            ConfigError: another machine has begun something else there since it was checked.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        _acquire(self._shared)
        if not self.is_finished():
            self.check()
        self.write(self._note.name, json.dumps(self._begun).encode())

    def write_files(
        self, sizes: Mapping[str, int], write: Callable[[str, Progress, Path], Any], doing: str
    ) -> None:
        """Has ``write`` make those files that are missing, under a bar that says ``doing``.

        Args:
            sizes: the bytes of all files, by name in their order.
            write: makes the file of that name at a path.

        Raises:
            ConfigError: the disk has no room for them. None is written.
        """
        missing = {name for name in sizes if not self.has(name)}
        self.check_room(sum(sizes[name] for name in missing))
        self.begin()
        missing = {name for name in missing if not self.has(name)}  # another machine's are there
        with progress(total=sum(sizes.values()), desc=doing, unit="B", unit_scale=True) as bar:
            for name, size in sizes.items():
                if name in missing:
                    self.save(name, partial(write, name, bar.update), size)
                else:
                    bar.update(size)

    def save(self, name: str, write: Callable[[Path], Any], num_bytes: int) -> None:
        """Has ``write`` make a file of that size and gives it its name once it is on the disk."""
        save_whole(self.path / name, write, num_bytes)

    def write(self, name: str, content: bytes) -> None:
        """Makes a file of that content."""
        self.save(name, lambda path: path.write_bytes(content), len(content))

    def write_index(self, weight_map: Mapping[str, str], total_size: int) -> None:
        """Writes which of several files each tensor is in. ``total_size`` is in bytes."""
        content = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        self.write(SAFE_WEIGHTS_INDEX_NAME, json.dumps(content, indent=2).encode())

    def finish(self, source: Path, config: Mapping[str, Any], *also: str) -> None:
        """Copies a tokenizer and whatever else is beside the weights in ``source``, and then
        writes the config.

        Args:
            source: the folder of the old checkpoint.
            config: the new one's.
            also: endings of names of other files that are copied.
        """
        for other in source.iterdir():
            is_kind = other.suffix in (".json", ".txt", ".model", ".jinja", *also)
            is_copied = is_kind and other.is_file()
            if is_copied and other.name not in (CONFIG, SAFE_WEIGHTS_INDEX_NAME):
                self.save(other.name, partial(shutil.copyfile, other), other.stat().st_size)
        # Last, because a folder with a config is taken for complete.
        self.write(CONFIG, json.dumps(config, indent=2).encode())
        self.tidy()

    def tidy(self) -> None:
        """Takes the note away from a folder that is complete."""
        for left in (self._note, Path(self._shared.lock_file)):
            with suppress(OSError):  # who only reads the folder may not
                left.unlink(missing_ok=True)


def identity_of(said: str, files: Iterable[Path]) -> str:
    """Tells work on these files from any other, by what they are called and how large and old they
    are. ``said``: what else it depends on."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((said, stats)).encode()).hexdigest()[:16]


def _lock(path: Path) -> FileLock:
    """Makes a lock that ends with its process, whatever ends that. Where a file system has none, a
    soft one would be a file that stays, and another machine would wait for it forever."""
    return FileLock(path, fallback_to_soft=False)


def _acquire(lock: FileLock) -> None:
    try:
        lock.acquire()
    except OSError as error:
        # Some file systems have no locks. What is not shared does not need one.
        if error.errno not in _NO_LOCKS:
            raise


def _mark_of(file: Path) -> str | None:
    try:
        with safe_open(file, "pt") as opened:
            return (opened.metadata() or {}).get(_MARK)
    except SafetensorError as error:
        raise ConfigError(
            f"{file} is damaged ({error}); empty its folder and call again"
        ) from error


def check_room(path: Path, num_bytes: float) -> None:
    """Raises ConfigError if the disk that ``path`` is on, or will be, has no room for that many
    bytes more."""
    free = free_bytes(path)
    if num_bytes + _SPARED_BYTES > free:
        raise ConfigError(
            f"{path}: about {num_bytes / 1e9:.1f} GB are to be written and {free / 1e9:.1f} GB are "
            "free on its disk; name a folder on another"
        )


def save_whole(
    target: Path, write: Callable[[Path], Any], num_bytes: int, *, beside: Path | None = None
) -> None:
    """Has ``write`` make a file of about that size ``beside`` the ``target``, which gets that name
    once it is on the disk. Default: in a folder that is locked, one that is nobody else's.

    Raises:
        OSError: the disk is full. What was written of the file is gone.
    """
    beside = beside or target.with_suffix(".part")
    try:
        write(beside)
        _keep(beside, target)
    except OSError as error:
        if not is_full(error, target):
            raise
        beside.unlink(missing_ok=True)
        raise OSError(
            errno.ENOSPC,
            f"No space left on the disk of {target.parent} while {target.name} was written: it "
            f"takes about {num_bytes} bytes, and {free_bytes(target)} are free without it; make "
            "room and call again: that goes on with what is missing",
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _keep(beside: Path, target: Path) -> None:
    """Gives the file its name once it is on the disk, and the folder too."""
    for path, then in ((beside, lambda: beside.replace(target)), (target.parent, lambda: None)):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
        then()


def write_tensors(
    path: Path,
    held: Mapping[str, tuple[torch.dtype, torch.Size]],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
    progress: Progress,
) -> None:
    """Writes a safetensors file tensor by tensor, so that one of them is in memory at once.

    Args:
        path: of the file.
        held: dtype and shape of each tensor.
        tensors: all of these, in any order.
        metadata: what the file says of itself.
        progress: is told of each tensor.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    # The largest elements first, so that all of them lie where they can be mapped.
    for name, (dtype, shape) in sorted(held.items(), key=lambda item: -item[1][0].itemsize):
        end = start + shape.numel() * dtype.itemsize
        said = SAFETENSORS_NAMES[str(dtype).removeprefix("torch.")]
        entries[name] = {"dtype": said, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # because readers map tensors where they are
    left = set(held)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            start, end = entries[name]["data_offsets"]
            content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            assert content.nbytes == end - start, name
            left.remove(name)
            file.seek(8 + len(header) + start)
            file.write(content.data)
            progress(content.nbytes)
    assert not left, left
