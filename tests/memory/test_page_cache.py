"""Advice about mapped files changes no value, drops pages where the system lets it, and tells when
a file has become shorter than what is mapped of it.

The judge of what is in memory is the kernel (mincore).
"""

import errno
import mmap
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from roundpipe.errors import ConfigError
from roundpipe.memory.mmap import FileMappings, refuse_cut
from roundpipe.memory.page_cache import PageCache, Stretch
from tests.support.mapped import cached_bytes

PAGES = 2048  # more than the system keeps together


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two weights, on the disk."""
    path = tmp_path / "model.safetensors"
    values = torch.arange(2 * PAGES * mmap.PAGESIZE // 4, dtype=torch.int32)
    first, second = values.chunk(2)
    save_file({"a": first.clone(), "b": second.clone()}, path)
    with path.open("rb") as opened:
        os.fsync(opened.fileno())  # because pages that are not on the disk yet cannot be dropped
    return path


def stretch_of(tensor: torch.Tensor) -> Stretch:
    mapping = FileMappings.now().mapping_of(tensor)
    assert mapping is not None
    return Stretch.of(tensor, mapping)


def test_pages_are_read_and_dropped_and_read_again(file: Path) -> None:
    cache, mapped = PageCache(), load_file(file)
    stretch = stretch_of(mapped["a"])
    assert cache.read(stretch.start, stretch.num_bytes)
    assert cached_bytes(mapped["a"]) >= stretch.num_bytes
    cache.let_go(stretch)
    if cached_bytes(mapped["a"]) >= stretch.num_bytes:
        pytest.skip("the temporary folder lies in memory, or the system knows no MADV_PAGEOUT")
    assert cached_bytes(mapped["a"]) <= 2 * mmap.PAGESIZE  # the edges, which neighbours may need
    assert torch.equal(mapped["a"], torch.arange(len(mapped["a"]), dtype=torch.int32))
    assert cache.read(stretch.start, stretch.num_bytes)
    assert cached_bytes(mapped["a"]) >= stretch.num_bytes


def test_what_somebody_has_written_to_a_weight_stays(file: Path) -> None:
    """The mappings are private: MADV_DONTNEED would bring the file's values back."""
    mapped = load_file(file)
    mapped["a"][1000:3000] = -1
    expected = mapped["a"].clone()
    PageCache().let_go(stretch_of(mapped["a"]))
    assert torch.equal(mapped["a"], expected)
    assert torch.equal(load_file(file)["a"], torch.arange(len(expected), dtype=torch.int32))


def test_pages_behind_the_end_of_a_file_are_told(file: Path) -> None:
    """Who reads them ends with SIGBUS."""
    mapped = load_file(file)
    stretch = stretch_of(mapped["b"])
    os.truncate(file, (PAGES + 1) * mmap.PAGESIZE)
    cache = PageCache()
    there = cache.read(stretch.start, stretch.num_bytes)
    if not cache._populates:
        pytest.skip("the system knows no MADV_POPULATE_READ")
    assert not there
    assert cache.read(*stretch_of(mapped["a"])[:2])


def test_a_file_that_was_cut_is_refused(file: Path) -> None:
    mapped = load_file(file)
    mapping = FileMappings.now().mapping_of(mapped["b"])
    assert mapping is not None
    refuse_cut(mapping, mapped["b"])
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(ConfigError, match=rf"{size - 1} bytes.*byte {size}:"):
        refuse_cut(mapping, mapped["b"])


@pytest.mark.parametrize("replaced", [True, False])
def test_a_mapping_of_a_file_that_was_replaced_or_removed_is_whole(
    replaced: bool, file: Path
) -> None:
    """It shows the old one, whatever is there under its name now."""
    mapped = load_file(file)
    file.unlink()
    if replaced:
        file.write_bytes(b"short")
    mapping = FileMappings.now().mapping_of(mapped["b"])
    assert mapping is not None
    assert mapping.path == str(file)
    refuse_cut(mapping, mapped["b"])


class OldSystem(PageCache):
    """Knows only what every Linux does."""

    def __init__(self) -> None:
        super().__init__()
        self.advised: list[tuple[int, int, int]] = []

    def _advise(self, start: int, num_bytes: int, advice: int) -> int:
        self.advised.append((start, num_bytes, advice))
        return 0 if advice == mmap.MADV_WILLNEED else errno.EINVAL


def test_an_older_system_is_asked_to_read_and_lets_go_as_it_likes() -> None:
    cache, start, size = OldSystem(), 7 * mmap.PAGESIZE + 5, (5 << 20) // 2
    for _ in range(2):
        assert cache.read(start, size)
    cache.let_go(Stretch(start, size, "/nowhere"))
    asked = [advised for advised in cache.advised if advised[2] == mmap.MADV_WILLNEED]
    assert len(cache.advised) == len(asked) + 2  # what it does not know, it is not asked again
    for (first, length, _), (following, *_) in pairwise(asked[:3]):
        assert first + length == following
    assert asked[0][0] == 7 * mmap.PAGESIZE
    assert sum(length for _, length, _ in asked) == 2 * (size + 5)


def test_a_file_of_somebody_else_is_only_let_go_when_memory_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system drops no pages then, also none on advice."""
    cache = OldSystem()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda *_: False)
    cache.let_go(Stretch(0, 10 * mmap.PAGESIZE, "/"))
    monkeypatch.setattr(os, "access", lambda *_: True)
    cache.let_go(Stretch(0, 10 * mmap.PAGESIZE, "/proc"))
    assert [advice for *_, advice in cache.advised] == [20, 21]


def test_little_at_the_edges_of_pages_stays() -> None:
    cache = OldSystem()
    cache.let_go(Stretch(mmap.PAGESIZE - 1, mmap.PAGESIZE, "/nowhere"))
    assert not cache.advised
