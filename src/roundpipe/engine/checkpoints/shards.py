"""A checkpoint as a folder of ``torch.distributed.checkpoint``'s, of which each process writes the
tensors that it owns.

[Note: shards] The folder has the keys of the one file, each written whole by one rank, so nothing
of it depends on how many ranks there were, and torch's own tools read it. Plans and results of
torch's planner go through `Ranks`, not through its collectives, because those do not name a rank
that is lost. It is made beside its place and renamed when all have written and ``.metadata`` is on
the disk.
"""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ...errors import ConfigError
from ...params.ranks import Ranks
from .one_file import (
    REST,
    bytes_of,
    refuse_lack_of_room,
    sync,
    telling_of_a_full_disk,
)
from .refused import refused_alike

_METADATA = ".metadata"
_ALIGNMENT = 16  # bytes, of which every dtype has a divisor


def write_shards(target: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Writes what the ranks give, each key one of them, to a folder that is not there yet. All call
    it.

    Raises:
        ConfigError: a rank does not see the folder that the first one has made, or has no room for
        its shard on the disk; all go on.
        What else kept this rank from writing; on the others a RankError that names it. There is no
        folder then.
    """
    unfinished = target.with_name(target.name + ".unfinished")
    is_first, num_bytes = ranks.rank == 0, bytes_of(tensors.values())
    try:
        with ranks.agreeing("making the folder of the checkpoint"):
            if is_first:
                shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
                unfinished.mkdir(parents=True)
        with refused_alike(ranks, "writing shards of a checkpoint"):
            # Because each would make one of its own, on its own disk, and nobody would notice.
            if not unfinished.is_dir():
                raise ConfigError(
                    f"{unfinished.absolute()} is not there, which the first process has made: name "
                    "a folder on a disk that all processes see, by a path that is the same for all"
                )
            refuse_lack_of_room(target, num_bytes)
        with (
            ranks.agreeing("writing its shard of the checkpoint"),
            telling_of_a_full_disk(target, num_bytes),
        ):
            writer, planner = FileSystemWriter(unfinished), DefaultSavePlanner(False)
            # Each names its file by its number, so that no plan need come back to it.
            writer.set_up_storage_writer(is_first, rank=ranks.rank, use_collectives=False)
            planner.set_up_planner(dict(tensors), writer.storage_meta(), is_first)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            written = writer.write_data(plan, planner).value()
        told = ranks.gathered({}, (plan, written))
        with ranks.agreeing("finishing the checkpoint"):
            if told is not None:
                plans, results = zip(*told[1], strict=True)
                _, metadata = planner.create_global_plan(list(plans))
                FileSystemWriter(unfinished).finish(metadata, list(results))
                Shards(unfinished)  # refuses where a file is not here, or not whole
                sync(unfinished)
                os.rename(unfinished, target)
                sync(target.parent)
    except BaseException:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


class Shards:
    """A folder that `write_shards` has made, read as safetensors reads a file.

    Raises:
        ConfigError: it is no such folder, or a file of it is missing or was cut.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} has no {_METADATA}: it is no checkpoint that "
                "save_checkpoint(sharded=True) has finished"
            ) from None
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
            raise ConfigError(f"{folder / _METADATA} cannot be read: {error}") from error
        entries = self._metadata.state_dict_metadata
        if REST not in entries:
            raise ConfigError(
                f"{folder} was written by torch.distributed.checkpoint, not by save_checkpoint(): "
                f"it has no {REST!r} among its {len(entries)} entries"
            )
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        sizes: dict[str, int] = {}
        for part in (self._metadata.storage_data or {}).values():
            end = part.offset + part.length
            sizes[part.relative_path] = max(end, sizes.get(part.relative_path, 0))
        for name, size in sizes.items():
            path = folder / name
            there = path.stat().st_size if path.is_file() else 0
            if there < size:
                raise ConfigError(
                    f"{path} has {there} bytes, and {size} were written; the checkpoint is not "
                    "whole, so copy its folder again or load another one"
                )

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._metadata.state_dict_metadata)

    def get_slice(self, key: str) -> "_Slice":
        return _Slice(self._described(key))

    def get_tensor(self, key: str) -> torch.Tensor:
        """In memory of its own."""
        described = self._described(key)
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor

    def num_bytes(self, key: str) -> int:
        described = self._described(key)
        size: int = described.size.numel() * described.properties.dtype.itemsize
        return size

    def _described(self, key: str) -> Any:
        described = self._metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata)
        return described


@contextmanager
def mapped_copies(shards: Shards, target: Path) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors of the ``shards``, in a file beside ``target`` that is gone afterwards, so that
    they need no memory.

    Raises:
        ConfigError: there is no room for that file and the ``target``; nothing was written.
        OSError: the disk ran full.
    """
    places, end = dict[str, int](), 0
    for key in shards.keys():  # noqa: SIM118  # it is no mapping
        places[key] = end
        end += -(-shards.num_bytes(key) // _ALIGNMENT) * _ALIGNMENT
    unfinished = target.with_name(target.name + ".tensors")
    refuse_lack_of_room(target, 2 * end)
    try:
        with telling_of_a_full_disk(target, 2 * end):
            _allocate(unfinished, end)
        mapped = torch.from_file(str(unfinished), shared=True, size=end, dtype=torch.uint8)
        tensors = {}
        for key, begin in places.items():
            tensor = shards.get_tensor(key).contiguous()
            flat = mapped[begin : begin + tensor.nbytes].view(tensor.dtype)
            tensors[key] = flat.view(tensor.shape).copy_(tensor)
        yield tensors
    finally:
        unfinished.unlink(missing_ok=True)


def _allocate(path: Path, num_bytes: int) -> None:
    """Because a write to a mapped page that finds the disk full ends the process."""
    if hasattr(os, "posix_fallocate"):
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)


class _Slice(NamedTuple):
    described: Any

    def get_shape(self) -> list[int]:
        return list(self.described.size)
