"""A process killed with SIGKILL while it packs, merges, stacks or saves: what has its name is
whole, and the next process, which no lock keeps waiting, goes on to the same bytes.

Each test is a program of its own, which forks children before any thread exists. Where one thread
does all, they are killed after ten of the calls that change the disk or a lock, drawn from a seed;
engines, which have several, are killed at any time.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

BEGIN = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
import torch._dynamo  # what the first optimizer would import, once instead of in each child
from pathlib import Path
from tests.support.killed import count_changes, kill_after, kill_often, start, times_of
torch.set_num_threads(1)
out = Path("out")


def in_child(work):
    return times_of(lambda tell: (tell(), work()))[-1]


def content(folder):
    return {{file.name: file.read_bytes() for file in sorted(folder.iterdir())}}
"""

# What makes a checkpoint out of another goes on with the files that are missing.
FILES = """
import random, shutil


def write_again_and_again(write):
    in_child(lambda: write(Path("whole")))
    whole = content(Path("whole"))

    def look(_):
        kept = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
        assert all(file.read_bytes() == whole[file.name] for file in kept), kept
        is_done = (out / "config.json").exists()
        assert not is_done or len(kept) == len(list(Path("whole").glob("*.safetensors")))
        in_child(lambda: write(out))
        assert content(out) == whole
        assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
        shutil.rmtree(out)

    changes = range(1, count_changes(lambda: write(out)) + 1)
    shutil.rmtree(out)
    kill_after(lambda: write(out), sorted(random.Random(0).sample(changes, 10)), look)
    print("killed: 10 of 10")
"""

PACKING = """
from roundpipe_hf.quantization import packing
from tests.hf.quantization.test_reading import llama

in_child(lambda: llama().save_pretrained("source", max_shard_size="40KB"))
files = sorted(Path("source").glob("*.safetensors"))
write_again_and_again(
    lambda folder: packing.quantize_checkpoint(files, folder, "nf4", lambda key: "proj" in key)
)
"""

# One that waits for the lock, on the same machine or on another that shares the folder, goes on
# when the one that holds it is killed.
WAITING = """
import shutil, signal, tempfile
from filelock import FileLock
from roundpipe_hf.quantization import packing
from tests.hf.quantization.test_reading import llama


def write(folder):
    packing.quantize_checkpoint(files, folder, "nf4", lambda key: "proj" in key)


def hold(tell):
    packing.write_tensors = lambda *_: (tell(), signal.pause())
    write(out)


def wait(tell):
    acquire = FileLock.acquire

    def tells(lock):
        tell()
        acquire(lock)

    FileLock.acquire = tells
    tempfile.tempdir = machine
    write(out)


in_child(lambda: llama().save_pretrained("source", max_shard_size="40KB"))
files = sorted(Path("source").glob("*.safetensors"))
in_child(lambda: write(Path("whole")))
os.mkdir("other")
for machine, locks in ((None, 1), ("other", 2)):
    holder, told = start(hold)
    os.read(told, 1)
    waiter, waits = start(wait)
    for _ in range(locks):
        os.read(waits, 1)
    os.kill(holder, signal.SIGKILL)
    assert os.waitpid(holder, 0)[1] == signal.SIGKILL
    assert os.waitpid(waiter, 0)[1] == 0
    assert content(out) == content(Path("whole"))
    shutil.rmtree(out)
"""

MERGING = """
from roundpipe_hf import merge_and_save
from tests.hf.export.test_merging import adapter_of, base


def make():
    path = base("llama", Path("made"), max_shard_size="40KB")
    adapter_of(path, Path("adapter"), target_modules="all-linear")
    path.rename("base")


in_child(make)
write_again_and_again(lambda folder: merge_and_save("adapter", "base", folder))
"""

STACKING = """
from roundpipe_hf import stack_experts
from roundpipe_hf.export import stacking
from tests.hf.export.test_merging import base

stacking._FILE_BYTES = 20_000
in_child(lambda: base("qwen3-moe", Path("made")))
write_again_and_again(lambda folder: stack_experts("made/base", folder))
"""

# All tensors of a checkpoint have to be those of one and the same step, which is not before the
# last whose save had returned. A file takes the last one's place; a folder has a name of its own.
SAVING = """
from safetensors.torch import load_file
from roundpipe import consolidate_checkpoint, load_checkpoint, save_checkpoint
from tests.engine.test_sharded_checkpoint import make, step

os.mkdir("out")
os.mkdir("steps")


def latest():
    there = [name for name in os.listdir("out") if not name.endswith(".unfinished")]
    return "out/" + max(there, key=int) if there else None


def train(tell, steps, folder="out"):
    engine, optimizer = make()
    with engine:
        if folder == "out" and latest():
            load_checkpoint(latest(), engine, optimizer)
        for number in range(at + 1, at + 1 + steps):
            step(engine, optimizer, seed=0)
            path = f"{folder}/{number if SHARDED or folder == 'steps' else 0}"
            save_checkpoint(path, engine, optimizer, sharded=SHARDED)
            tell()


def tensors_in(path):
    if SHARDED:
        in_child(lambda: consolidate_checkpoint(path, "one"))
    return load_file("one" if SHARDED else path)


def is_at(number):
    if number not in steps:
        steps[number] = tensors_in(f"steps/{number}")
    found = tensors_in(latest())
    assert found.keys() == steps[number].keys()
    is_same = {key: torch.equal(found[key], value) for key, value in steps[number].items()}
    del is_same["rest"]  # because random numbers that nobody draws are in it
    return all(is_same.values())


def look(told):
    global at
    at = next(number for number in range(at + told, at + told + 2) if is_at(number))


at, steps = 0, {}
times = times_of(lambda tell: train(tell, 60, "steps"))
kill_often(lambda tell: train(tell, 4), 1.5 * times[1], look)
in_child(lambda: train(lambda: None, 1))
look(1)
left = [name for name in os.listdir("out") if name.endswith(".unfinished")]
assert not left, "a later save must clear what was left"
"""

TRAINER = """
from transformers.trainer_utils import get_last_checkpoint
from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import MODELS, make_trainer, run, token_rows, weights


def train(tell, steps, folder="out"):
    class Tells(RoundPipeTrainer):
        def _save_checkpoint(self, *args, **kwargs):
            tell()
            super()._save_checkpoint(*args, **kwargs)

    settings = dict(
        output_dir=folder,
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        optim="adamw_torch",
        lr_scheduler_type="constant",
    )
    model = MODELS["full"]().bfloat16()
    trainer = make_trainer(Tells, model, token_rows(30), **settings)
    run(trainer, resume_from_checkpoint=last() if folder == "out" else None)
    torch.save(weights(trainer), f"{folder}.pt")


def last():
    return get_last_checkpoint("out") if out.is_dir() else None


times = times_of(lambda tell: train(tell, 4, "whole"))
steps = 0


def look(told):
    global steps
    now = int(last().rpartition("-")[2]) if last() else 0
    assert steps + told - 1 <= now <= steps + told
    steps = now


kill_often(lambda tell: train(tell, 100), 2.5 * times[1], look)
assert steps > 2, "all were killed before their first save had ended"
for folder in ("out", "whole"):
    in_child(lambda: train(lambda: None, steps + 1, folder))
ours, whole = (torch.load(f"{folder}.pt") for folder in ("out", "whole"))
assert all(torch.equal(ours[name], value) for name, value in whole.items())
assert sorted(os.listdir("out")) == sorted(f"checkpoint-{n}" for n in (steps, steps + 1))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(FILES + PACKING, id="packing"),
        pytest.param(FILES + MERGING, id="merging"),
        pytest.param(FILES + STACKING, id="stacking"),
        pytest.param("SHARDED = False" + SAVING, id="one file"),
        pytest.param("SHARDED = True" + SAVING, id="sharded"),
        pytest.param(TRAINER, id="trainer"),
    ],
)
def test_killed_ten_times(program: str, tmp_path: Path) -> None:
    assert "killed: 10 of" in output_of(program, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_killed_while_another_waits(tmp_path: Path) -> None:
    output_of(WAITING, tmp_path)


def output_of(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
