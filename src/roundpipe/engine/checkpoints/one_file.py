"""The one file of a checkpoint, and what opens either form."""

import io
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from ...errors import ConfigError
from ...system.disk import free_bytes, is_full

_FORMAT = {"format": "roundpipe", "version": "1"}
REST = "rest"


def open_checkpoint(path: Path) -> Any:
    """An open file has the ``keys`` of a checkpoint and their tensors; its context closes it."""
    if path.is_dir():
        from .shards import Shards  # late, as it takes long to import

        return Shards(path)
    file = safetensors.safe_open(str(path), "pt")
    if file.metadata() != _FORMAT:
        raise ConfigError(
            f"{path} has metadata {file.metadata()}, not {_FORMAT}: it was not written by this "
            "version's save_checkpoint(); its weights can be loaded with load_state_dict()"
        )
    return file


def packed(rest: dict[str, Any]) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    tensor = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        unpacked(tensor)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            "the optimizer's param groups or state, or the model's extra state, hold something "
            f"that could not be loaded again: {error}"
        ) from error
    return tensor


def unpacked(tensor: torch.Tensor) -> dict[str, Any]:
    rest: dict[str, Any] = torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)
    return rest


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the file can be written from its memory."""
    dense = tensor.detach().cpu().contiguous()
    # Because counters may be shared, and the tables of quantized weights are, which safetensors
    # refuses.
    return dense.clone() if dense.numel() <= 256 else dense


def replace(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    """[1] a sibling is written and on the disk, [2] it takes the name, [3] the folder is on the
    disk.

    Raises:
        ConfigError: the disk has too little room; nothing was written.
        OSError: the disk ran full.
    """
    num_bytes = bytes_of(tensors.values())
    refuse_lack_of_room(target, num_bytes)
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        with telling_of_a_full_disk(target, num_bytes):
            save_file(tensors, unfinished, metadata=_FORMAT)
            sync(unfinished)
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(target.parent)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def refuse_lack_of_room(target: Path, num_bytes: int) -> None:
    """Raises ConfigError if the disk has no room for that much more, while the file or folder that
    it replaces is still there."""
    free = free_bytes(target)
    if num_bytes > free:
        raise ConfigError(
            f"{target}: {num_bytes} bytes are to be written and {free} are free on its disk; make "
            "room there or name a place on another, and save again"
        )


@contextmanager
def telling_of_a_full_disk(target: Path, num_bytes: int) -> Iterator[None]:
    """What cannot be written because others have filled the disk meanwhile ends in an OSError that
    says so."""
    try:
        yield
    except Exception as error:
        if not is_full(error, target):
            raise
        raise OSError(
            ENOSPC,
            f"No space left on the disk of {target}, to which {num_bytes} bytes were being written "
            f"({free_bytes(target)} are free); make room and save again",
        ) from error


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
