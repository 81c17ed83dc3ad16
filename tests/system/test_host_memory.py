"""Free host memory: what a group of processes is confined to counts, and what it can give up does
not."""

from pathlib import Path

import pytest

from roundpipe.memory.pinning import HostArena
from roundpipe.system import host_memory

OLD = {
    "limit": "memory.limit_in_bytes",
    "usage": "memory.usage_in_bytes",
    "cache": "total_cache",
    "shared": "total_shmem",
}
NEW = {"limit": "memory.max", "usage": "memory.current", "cache": "file", "shared": "shmem"}


@pytest.fixture(params=[OLD, NEW], ids=["old", "new"])
def names(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param


def write_group(
    folder: Path, names: dict[str, str], *, limit: str, usage: int, cache: int, shared: int
) -> None:
    (folder / names["limit"]).write_text(f"{limit}\n")
    (folder / names["usage"]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"anon 7\n{names['cache']} {cache}\n{names['shared']} {shared}\n"
    )


def test_pages_of_files_are_given_up_when_memory_is_needed(
    tmp_path: Path, names: dict[str, str]
) -> None:
    write_group(tmp_path, names, limit="1000", usage=900, cache=300, shared=0)
    assert host_memory._free_in(tmp_path) == 400


def test_shared_memory_is_not(tmp_path: Path, names: dict[str, str]) -> None:
    """It counts as pages of files, but is not given up: page-locked weights and gradients lie in
    it."""
    write_group(tmp_path, names, limit="1000", usage=900, cache=300, shared=250)
    assert host_memory._free_in(tmp_path) == 150


def test_a_group_without_a_limit_or_without_a_say_confines_nobody(tmp_path: Path) -> None:
    assert host_memory._free_in(tmp_path) is None
    write_group(tmp_path, NEW, limit="max", usage=900, cache=300, shared=0)
    assert host_memory._free_in(tmp_path) is None


def test_memory_of_an_arena_is_shared_with_processes_forked_later() -> None:
    """Pages that are private would be copied at the first write after a fork, and devices would
    read the old ones."""
    arena = HostArena(1 << 20, lock=False)
    address = arena.bytes.data_ptr()
    (mode,) = (
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split()[0].split("-")[1], 16)
    )
    assert mode == "rw-s"
