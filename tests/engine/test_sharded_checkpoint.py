"""A sharded checkpoint has what the one file has, in any number of processes, and becomes that file
when it is consolidated."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint import format_utils

import roundpipe
from roundpipe import ConfigError, consolidate_checkpoint, load_checkpoint, save_checkpoint
from roundpipe.engine.checkpoints import one_file, shards
from roundpipe.errors import RankError
from tests.support.models import make_mlp, mlp_batch
from tests.support.processes import check_in_processes

Made = tuple[roundpipe.RoundPipe, torch.optim.Optimizer]


def make(group: Any = None) -> Made:
    """bf16 weights, which hold less than their masters."""
    torch.manual_seed(0)
    model = make_mlp().bfloat16()
    engine = roundpipe.RoundPipe(model, torch.float32, devices=1, process_group=group)
    return engine, roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)


def step(engine: roundpipe.RoundPipe, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """All ranks have the same rows, each a share of the loss that is a power of two, so that sums
    are the same to the bit."""
    batch, share = mlp_batch(4, seed), engine.ranks.count
    engine.forward_backward(
        (batch.args[0].bfloat16(),), loss_fn=lambda out, _: out.float().square().sum() / share
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    engine.step(update, is_async=False)


@contextmanager
def trained(seeds: range, source: str | None = None, group: Any = None) -> Iterator[Made]:
    engine, optimizer = make(group)
    with engine:
        if source is not None:
            load_checkpoint(source, engine, optimizer)
        for seed in seeds:
            step(engine, optimizer, seed)
        yield engine, optimizer


def saved(path: str, **how: Any) -> dict[str, torch.Tensor]:
    """Returns what the one file has after two steps of one process, but for random numbers."""
    with trained(range(2)) as (engine, optimizer):
        torch.manual_seed(5)
        save_checkpoint(path, engine, optimizer, **how)
        engine.synchronize()
        save_checkpoint(f"{path}-as-one", engine, optimizer)
    return load_file(f"{path}-as-one")


def test_one_process_saves_consolidates_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    as_one = saved("shards", sharded=True)
    assert sorted(os.listdir()) == ["shards", "shards-as-one"]
    consolidate_checkpoint("shards", "consolidated")
    assert sorted(os.listdir()) == ["consolidated", "shards", "shards-as-one"]
    torch.testing.assert_close(load_file("consolidated"), as_one, atol=0, rtol=0)
    states = []
    for source in ("shards", "consolidated", "shards-as-one"):
        with trained(range(2, 4), source) as (engine, _):
            states.append({n: m.detach().clone() for n, m in engine.optim_named_parameters()})
    for other in states[1:]:
        torch.testing.assert_close(other, states[0], atol=0, rtol=0)


def test_torchs_own_tools_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    as_one = saved("shards", sharded=True)
    format_utils.dcp_to_torch_save("shards", "of-torch.pt")
    torch.testing.assert_close(torch.load("of-torch.pt"), as_one, atol=0, rtol=0)


def test_what_is_no_whole_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved("shards", sharded=True)
    os.mkdir("empty")
    torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id="foreign", no_dist=True)
    for name, spoil in (("cut", cut), ("lost", Path.unlink)):
        shutil.copytree("shards", name)
        spoil(Path(name, "__0_0.distcp"))
    shutil.copytree("shards", "garbled")
    Path("garbled/.metadata").write_bytes(b"no pickle")
    refused = {
        "empty": r"no \.metadata",
        "foreign": r"written by torch\.distributed\.checkpoint.*'rest' among its 1 entries",
        "cut": r"__0_0\.distcp has 100 bytes, and \d+ were written",
        "lost": r"__0_0\.distcp has 0 bytes, and \d+ were written",
        "garbled": "cannot be read",
    }
    with trained(range(1)) as (engine, optimizer):
        before = {n: p.detach().clone() for n, p in engine.named_parameters()}
        for name, said in refused.items():
            with pytest.raises(ConfigError, match=said):
                load_checkpoint(name, engine, optimizer)
            with pytest.raises(ConfigError, match=said):
                consolidate_checkpoint(name, "out")
        with pytest.raises(ConfigError, match="is there already"):
            save_checkpoint("shards", engine, optimizer, sharded=True)
        torch.testing.assert_close(dict(engine.named_parameters()), before, atol=0, rtol=0)
    with pytest.raises(ConfigError, match="no folder"):
        consolidate_checkpoint("shards-as-one", "out")
    os.mkdir("out-folder")
    with pytest.raises(ConfigError, match="out-folder is a folder"):
        consolidate_checkpoint("shards", "out-folder")
    assert not os.path.exists("out")


@pytest.mark.parametrize("sharded", [False, True])
def test_too_little_room_is_refused_with_both_numbers(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was that of a library, which said neither."""
    monkeypatch.chdir(tmp_path)
    with trained(range(1)) as (engine, optimizer):
        save_checkpoint("before", engine, optimizer, sharded=sharded)
        usage: Any = shutil._ntuple_diskusage(2000, 1993, 7)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ConfigError, match=r"saved: \d+ bytes are to be written and 7 are free"):
            save_checkpoint("saved", engine, optimizer, sharded=sharded)
    if sharded:
        with pytest.raises(ConfigError, match=r"one: \d+ bytes are to be written and 7 are free"):
            consolidate_checkpoint("before", "one")
    assert os.listdir() == ["before"]


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fails_as_safetensors(*_: Any, **__: Any) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


FULL: dict[str, tuple[Any, str, Callable[..., None], Callable[..., None]]] = {
    "one file": (
        one_file,
        "save_file",
        fails_as_safetensors,
        lambda *made: save_checkpoint("saved", *made),
    ),
    "sharded": (
        shards.FileSystemWriter,
        "write_data",
        fails,
        lambda *made: save_checkpoint("more", *made, sharded=True),
    ),
    "consolidated": (
        os,
        "posix_fallocate",
        fails,
        lambda *_: consolidate_checkpoint("saved", "one"),
    ),
}


@pytest.mark.parametrize("what", FULL)
def test_a_disk_that_others_fill_meanwhile(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file was mapped the process ended without a word."""
    monkeypatch.chdir(tmp_path)
    owner, name, function, save = FULL[what]
    with trained(range(1)) as made:
        save_checkpoint("saved", *made, sharded=what != "one file")
        before = contents("saved")
        message = r"No space left on the disk of \w+, to which \d+ bytes .*\(\d+ are free\)"
        monkeypatch.setattr(owner, name, function)
        with pytest.raises(OSError, match=message):
            save(*made)
    assert os.listdir() == ["saved"]
    assert contents("saved") == before


def contents(path: str) -> list[bytes]:
    files = sorted(Path(path).iterdir()) if os.path.isdir(path) else [Path(path)]
    return [file.read_bytes() for file in files]


def cut(path: Path) -> None:
    os.truncate(path, 100)


def test_several_processes(tmp_path: Path) -> None:
    check_in_processes(shards_of_two, tmp_path)


def shards_of_two() -> None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    os.makedirs(f"own-{rank}")
    with trained(range(2), group=group) as (engine, optimizer):
        save_checkpoint("two", engine, optimizer, sharded=True)
        save_checkpoint("two-as-one", engine, optimizer)
    assert not os.path.exists("two.unfinished")
    sizes = [Path(f"two/__{of}_0.distcp").stat().st_size for of in range(2)]
    assert min(sizes) > 0.3 * max(sizes)  # what trains is shared out
    if rank == 0:
        consolidate_checkpoint("two", "consolidated")
        both = load_file("consolidated"), load_file("two-as-one")
        for tensors in both:
            del tensors["rest"]
        torch.testing.assert_close(*both, atol=0, rtol=0)
    dist.barrier()
    # Two processes go on from one's, and one from two's, as one alone.
    with trained(range(2)) as (engine, optimizer):
        save_checkpoint(f"own-{rank}/one", engine, optimizer, sharded=True)
    states = []
    for source, of in (("own-0/one", group), ("two", group), ("two", None), ("own-0/one", None)):
        dist.barrier()
        with trained(range(2, 4), source, of) as (engine, _):
            states.append(
                {
                    name: master.detach().clone()
                    for name, master in engine.optim_named_parameters()
                    if getattr(master, "is_owned", True)
                }
            )
    for other in states[:-1]:
        torch.testing.assert_close(
            other, {name: states[-1][name] for name in other}, atol=1e-6, rtol=1e-5
        )
    one_refuses_and_all_go_on(group)
    one_writes_elsewhere(group)
    one_cannot_write(group)


def one_refuses_and_all_go_on(group: Any) -> None:
    """Nobody loads or saves what one of them cannot, and the next one is loaded by all: the others
    once loaded, and waited in the next step for one that had raised."""
    rank = dist.get_rank()
    engine, optimizer = make(group)
    shutil.copytree("two", f"own-{rank}/copy")
    if rank == 1:
        cut(Path("own-1/copy/__1_0.distcp"))
        torch.save({}, "own-1/there")
    calls: list[tuple[Callable[[], None], str]] = [
        (lambda: load_checkpoint(f"own-{rank}/copy", engine, optimizer), r"has 100 bytes"),
        (lambda: save_checkpoint(f"own-{rank}/there", engine, optimizer, sharded=True), "is there"),
        (  # as where each has a disk of its own
            lambda: save_checkpoint(f"own-{rank}/apart", engine, optimizer, sharded=True),
            "is not there, which the first process has made",
        ),
    ]
    for call, said in calls:
        named = "" if rank else "rank 1 raised ConfigError: .*"
        with pytest.raises(ConfigError, match=named + said):
            call()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigError, match="not one of the engine's"):
        save_checkpoint("never", engine, other)
    assert not os.path.exists("never")
    assert not [name for name in os.listdir(f"own-{rank}") if name.startswith("apart")]
    load_checkpoint("two", engine, optimizer)
    step(engine, optimizer, 7)
    engine.close()


def one_writes_elsewhere(group: Any) -> None:
    """To a folder of its own that a save before has left there: what the first one would finish
    would lack a shard."""
    rank = dist.get_rank()
    engine, optimizer = make(group)
    if rank == 1:
        os.mkdir("own-1/late.unfinished")
    kind, said = (RankError, "rank 0 raised") if rank else (ConfigError, "__1_0.distcp has 0 bytes")
    with pytest.raises(kind, match=said):
        save_checkpoint(f"own-{rank}/late", engine, optimizer, sharded=True)
    engine.close()
    assert not os.path.exists(f"own-{rank}/late")


def one_cannot_write(group: Any) -> None:
    """Its disk is full: no folder is left, and the others say so."""
    from torch.distributed.checkpoint import filesystem

    engine, optimizer = make(group)
    if dist.get_rank() == 1:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("no space left")

        filesystem.FileSystemWriter.write_data = fail  # type: ignore[assignment, method-assign]
    kind, said = (OSError, "no space") if dist.get_rank() else (RankError, "rank 1 raised OSError")
    with pytest.raises(kind, match=said):
        save_checkpoint("not-whole", engine, optimizer, sharded=True)
    engine.close()
    dist.barrier()
    assert not [name for name in os.listdir() if name.startswith("not-whole")]
