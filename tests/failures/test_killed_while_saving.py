"""A process killed with SIGKILL at any moment of a save leaves the old checkpoint whole, or already
the new one.

One process is started; it forks a child for each moment, before any thread exists. The child loads
the old checkpoint, trains on, saves over it and is killed at its moment. Afterwards the file has to
load, and to say which of the two it is by its weights.
"""

import subprocess
import sys

import pytest

PROGRAM = '''
import os, signal, sys
import safetensors.torch
import torch
import torch._dynamo  # what the first optimizer would import, once instead of in each child
from torch import nn
import roundpipe
from roundpipe.engine.checkpoints import one_file as checkpoint

torch.set_num_threads(1)
path = sys.argv[1]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def before(module, name):
    setattr(module, name, lambda *args, **kwargs: killed())


def after(module, name):
    original = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: (original(*args, **kwargs), killed()))


def half_written():
    """What is on the disk when the process dies inside the write."""
    original = checkpoint.save_file

    def half(tensors, name, metadata):
        original(tensors, name, metadata=metadata)
        os.truncate(name, os.stat(name).st_size // 2)
        killed()

    checkpoint.save_file = half


MOMENTS = {
    "before anything is written": lambda: before(checkpoint, "save_file"),
    "half way through the write": half_written,
    "written, not on the disk": lambda: before(os, "fsync"),
    "on the disk, not renamed": lambda: before(os, "replace"),
    "renamed": lambda: after(os, "replace"),
    "not at all": lambda: None,
}


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    engine = roundpipe.RoundPipe(model, devices=1)
    return engine, torch.optim.SGD(engine.optim_parameters(), lr=0.1)


def step(engine, optimizer):
    engine.forward_backward((torch.ones(2, 8),), loss_fn=lambda out, _: out.square().sum())
    engine.step(optimizer.step)


def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def first_save():
    engine, optimizer = make()
    step(engine, optimizer)
    roundpipe.save_checkpoint(path, engine, optimizer)


def save_and_die(arm):
    engine, optimizer = make()
    roundpipe.load_checkpoint(path, engine, optimizer)
    step(engine, optimizer)
    arm()
    roundpipe.save_checkpoint(path, engine, optimizer)


def check():
    engine, optimizer = make()
    roundpipe.load_checkpoint(path, engine, optimizer)


def saved_weight():
    """Reads the whole file."""
    return safetensors.torch.load_file(path)["model/0.weight"]


assert in_child(first_save) == 0
for moment, arm in MOMENTS.items():
    old = saved_weight()
    status = in_child(lambda: save_and_die(arm))  # begins with loading what the last one left
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed == (moment != "not at all"), (moment, status)
    assert torch.equal(saved_weight(), old) == (moment not in ("renamed", "not at all")), moment
assert in_child(check) == 0
assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], (
    "a later save must clear what was left"
)
print("moments:", len(MOMENTS))
'''


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_kill_at_every_moment(tmp_path: object) -> None:
    command = [sys.executable, "-c", PROGRAM, f"{tmp_path}/saved"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "moments: 6" in done.stdout
