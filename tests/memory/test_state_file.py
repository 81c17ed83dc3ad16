"""Tensors in a file without a name are as any other, stay what they are while their pages come and
go, and take disk for as long as they are there.

The judge of what is in memory is the kernel (mincore).
"""

import ctypes
import errno
import logging
import mmap
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import RoundPipe, optim
from roundpipe.errors import ConfigError
from roundpipe.memory import huge_pages, state_file
from roundpipe.memory.state_file import FILLED_BYTES, LEAST_BYTES, StateFile
from tests.support.mapped import cached_bytes

COUNT = 3 << 20  # of fp32: 12 MiB


@pytest.fixture
def file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path)


@pytest.mark.parametrize("shape", [(0,), (5,), (3, 1 << 20), (LEAST_BYTES // 2,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_memory_as_any_other(
    shape: tuple[int, ...], dtype: torch.dtype, file: StateFile
) -> None:
    for tensor in (file.zeros(shape, dtype), file.empty(shape, dtype)):
        torch.testing.assert_close(tensor, torch.zeros(shape, dtype=dtype), rtol=0, atol=0)
        assert type(tensor) is torch.Tensor
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert (file.span_of(tensor) is None) == (tensor.nbytes < LEAST_BYTES)


def test_pages_go_and_come_back_with_what_was_written(file: StateFile) -> None:
    first, second = (file.empty((COUNT,), torch.float32) for _ in range(2))
    for tensor, start in ((first, 0), (second, COUNT)):
        torch.arange(start, start + COUNT, out=tensor)
    span = file.span_of(first)
    assert span is not None
    file.let_go(span)
    if cached_bytes(first):
        pytest.skip("the temporary folder lies in memory")
    assert cached_bytes(second) == second.nbytes
    file.read(span, 0, first.nbytes, for_writing=True)
    assert cached_bytes(first) == first.nbytes
    assert torch.equal(first, torch.arange(COUNT, dtype=torch.float32))
    assert torch.equal(second, torch.arange(COUNT, 2 * COUNT, dtype=torch.float32))


def test_memory_that_was_filled_does_not_stay(file: StateFile) -> None:
    """Masters of a whole model are made one after the other, and there may be no room for them."""
    made = [file.empty((COUNT,), torch.float32).fill_(number) for number in range(30)]
    if cached_bytes(made[0]):
        pytest.skip("the temporary folder lies in memory")
    assert sum(map(cached_bytes, made)) <= FILLED_BYTES + made[0].nbytes
    assert [float(tensor[-1]) for tensor in made] == list(range(30))


def test_space_is_given_back_by_tensors_and_by_the_last_of_them(
    tmp_path: Path, file: StateFile
) -> None:
    other = StateFile(tmp_path)  # because engines may share a folder
    first, second = (file.empty((COUNT,), torch.float32) for _ in range(2))
    third = other.empty((COUNT,), torch.float32).fill_(3.0)
    assert list(tmp_path.iterdir()) == [], "else somebody would have to remove it"
    assert file.num_bytes >= 2 * first.nbytes
    view = first[1:]
    del first
    assert file.num_bytes >= 2 * second.nbytes, "a view is left"
    del view
    assert second.nbytes <= file.num_bytes < 2 * second.nbytes
    second.fill_(2.0)
    descriptor = file._file.descriptor
    del file
    assert float(second.sum()) == 2.0 * COUNT
    assert float(third.sum()) == 3.0 * COUNT
    assert os.fstat(descriptor).st_nlink == 0


def test_a_forked_process_takes_nothing_away(file: StateFile) -> None:
    """What is collected there is still in use here."""
    tensors = [file.empty((COUNT,), torch.float32).fill_(1.0)]
    process = os.fork()
    if process == 0:
        tensors.clear()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    assert float(tensors[0].sum()) == COUNT


def test_a_full_disk_is_refused_with_both_numbers(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to a page that finds no room would end the process."""
    kept = file.empty((COUNT,), torch.float32)

    def allocate(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 2, 7))
    message = f"needs {4 * COUNT} bytes more .* beside {4 * COUNT} .* has 7 free"
    with pytest.raises(ConfigError, match=message):
        file.empty((COUNT,), torch.float32)
    assert file.num_bytes >= kept.nbytes


@pytest.mark.parametrize("folder", ["file/below", "file"])
def test_a_folder_that_cannot_be_written_is_refused(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{folder}', where no file can be written"):
        StateFile(tmp_path / folder)
    with pytest.raises(ConfigError, match="optimizer_state_dir is 3; give the path"):
        StateFile(3)  # type: ignore[arg-type]


def test_an_engine_is_refused_before_its_model_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    usage: Any = shutil._ntuple_diskusage(9, 2, 7)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    masters = 4 * 257 * 256
    message = f"has 7 bytes free; masters need {masters} and two moments.* {2 * masters} more"
    with pytest.raises(ConfigError, match=message):
        RoundPipe(model, devices=1, optimizer_state_dir=tmp_path / "made")
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("moments", [2, 0], ids=["AdamW", "SGD"])
def test_moments_that_will_not_fit_are_told_of_when_the_engine_is_made(
    moments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody heard of it before the first step, whose optimizer then was refused. One that keeps
    none fits, so it is no error."""
    model = nn.Sequential(nn.Linear(256, 256))
    masters, x = 4 * 257 * 256, torch.ones(2, 256)
    free = 3 * 4 * 256 * 256 - 1  # the bias is small, and stays in memory
    usage: Any = shutil._ntuple_diskusage(free, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    allocate, left = os.posix_fallocate, [free]

    def takes_room(descriptor: int, offset: int, num_bytes: int) -> None:
        left[0] -= num_bytes
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no space")
        allocate(descriptor, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", takes_room)
    with RoundPipe(model, devices=1, optimizer_state_dir=tmp_path) as engine:
        assert f"has {free} bytes free; masters need {masters} " in caplog.text
        assert f" {2 * masters} more. The first step will be refused" in caplog.text
        made: Any = optim.AdamW if moments else optim.SGD
        optimizer = made(engine.optim_parameters(), lr=0.1)
        engine.forward_backward((x,), label=x, loss_fn=nn.functional.mse_loss)
        before = model[0].weight.detach().clone()
        if moments:
            with pytest.raises(ConfigError, match="optimizer state needs .* bytes more"):
                engine.step(optimizer.step, is_async=False)
        else:
            engine.step(optimizer.step, is_async=False)
            engine.synchronize()
        assert torch.equal(model[0].weight, before) == bool(moments)


def test_room_for_all_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 3 * 4 * 257 * 256
    usage: Any = shutil._ntuple_diskusage(free, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    model = nn.Sequential(nn.Linear(256, 256))
    RoundPipe(model, devices=1, optimizer_state_dir=tmp_path).close()
    assert "bytes free" not in caplog.text


def test_a_folder_in_memory_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw master:1 - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(state_file, "_MOUNTS", mounts)
    with caplog.at_level(logging.WARNING, "roundpipe"):
        StateFile(tmp_path)
    assert "memory by another name" in caplog.text


def test_what_is_pickled_comes_back_in_memory(file: StateFile) -> None:
    assert pickle.loads(pickle.dumps(file)) is huge_pages


def test_ordinary_memory_where_an_extent_was_is_not_the_files(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice that is right for the file's pages empties others. A whole extent goes with the
    moments that an optimizer drops when it loads, and the system gives its address away again."""
    monkeypatch.setattr(state_file, "_EXTENT_BYTES", 4 * COUNT)
    dropped = file.empty((COUNT,), torch.float32)
    span, address = file.span_of(dropped), dropped.data_ptr()
    file.empty((COUNT,), torch.float32)
    file._filled.clear()
    del dropped
    assert span is not None
    assert any(f"{address:x}-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    del span
    map_at = ctypes.CDLL(None).mmap
    map_at.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    where = map_at(ctypes.c_void_p(address), ctypes.c_size_t(4 * COUNT), 3, flags, -1, 0)
    assert where == address, "the extent is still mapped"
    other = torch.frombuffer((ctypes.c_uint8 * (4 * COUNT)).from_address(where), dtype=torch.uint8)
    assert file.span_of(other) is None


def test_a_limit_of_file_sizes_is_told_also_when_the_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is only for making the file, and ``~`` is the user's home, as in a shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = StateFile("~/state")
    (tmp_path / "state").rmdir()

    def truncate(*_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(ConfigError, match=r"free \(File too large\)"):
        file.empty((COUNT,), torch.float32)
