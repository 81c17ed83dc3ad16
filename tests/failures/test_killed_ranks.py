"""A process of three is killed with SIGKILL at moments drawn over a whole run, ten times. Each time
the others end by themselves and name it, no checkpoint is half there, and the run that is started
again has the losses of one that nobody has disturbed, to the bit.

One process is started; it forks the ranks of every run, before any thread exists.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import json, os, random, signal, sys, time, traceback
from datetime import timedelta
import torch
import torch._dynamo  # what the first optimizer would import, once instead of in each child
import torch.distributed as dist
from torch import nn
import roundpipe
from roundpipe.engine.checkpoints import one_file
from roundpipe.errors import RankError
from roundpipe.params import masters, ranks

torch.set_num_threads(1)
os.chdir(sys.argv[1])
RANKS, STEPS, TIMEOUT_S = 3, 6, 60
DRAWS = random.Random(0)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


class Moment:
    """Kills this rank when it gets to ``place`` for the ``count``-th time."""

    def __init__(self, place=None, count=0):
        self.place, self.count = place, count

    def __call__(self, place):
        if place == self.place:
            self.count -= 1
            if self.count <= 0:
                kill_self()


class Watched(nn.Linear):
    def forward(self, x):
        self.passes("in a forward, also a recomputed one")
        return super().forward(x)


def rank_main(rank, store, moment, is_async):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    swaps = ranks.Ranks._swap

    def swap(*args):
        moment("at a message of any kind")
        return swaps(*args)

    ranks.Ranks._swap = swap
    real_init = masters.Masters.__init__

    def make_masters(self, *args):
        moment("making the engine")
        real_init(self, *args)

    masters.Masters.__init__ = make_masters
    if moment.place == "half way through a save":
        whole = one_file.save_file

        def half(tensors, name, metadata):
            whole(tensors, name, metadata=metadata)
            os.truncate(name, os.stat(name).st_size // 2)
            moment("half way through a save")
            whole(tensors, name, metadata=metadata)

        one_file.save_file = half
    torch.manual_seed(0)
    Watched.passes = staticmethod(moment)
    model = nn.Sequential(Watched(8, 8), nn.Dropout(0.2), Watched(8, 8), nn.Linear(8, 8))
    model.register_buffer("step", torch.zeros((), dtype=torch.int64))
    engine = roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
    torch.manual_seed(rank)
    first = 0
    if os.path.exists("state"):
        roundpipe.load_checkpoint("state", engine, optimizer)
        first = int(engine.model.get_buffer("step"))

    def update():
        moment("in step_fn")
        roundpipe.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def loss_fn(out, _):
        moment("in the loss")
        return out.square().sum()

    for step in range(first, STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * RANKS + rank))
        loss = engine.forward_backward((x,), loss_fn=loss_fn)
        engine.step(update, is_async=is_async)
        engine.model.get_buffer("step").fill_(step + 1)
        if step % 2:
            roundpipe.save_checkpoint("state", engine, optimizer)
        moment("between two steps")
        with open(f"losses-{rank}", "a") as file:
            print(json.dumps([step, loss.item().hex()]), file=file)
    engine.synchronize()
    engine.close()
    dist.destroy_process_group()


def in_child(rank, *given):
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        rank_main(rank, *given)
    except RankError as error:
        code = 3
        with open(f"said-{rank}", "w") as file:
            print(error, file=file)
    except BaseException:
        code = 4
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    # As a script that ends with a traceback does, which closes its connections.
    os._exit(code)


number = 0


def run(is_async, killed=None, moment=None):
    """Returns how each rank ended, and how long the others took after the killed one."""
    global number
    number += 1
    store = os.path.abspath(f"store-{number}")
    children = {
        in_child(rank, store, moment if rank == killed else Moment(), is_async): rank
        for rank in range(RANKS)
    }
    codes, gone = {}, time.monotonic()
    signal.alarm(3 * TIMEOUT_S)  # which ends this program, and so the test
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if rank == killed:
            gone = time.monotonic()
    signal.alarm(0)
    if os.path.exists(store):
        os.unlink(store)
    return [codes[rank] for rank in range(RANKS)], time.monotonic() - gone


def losses():
    """By rank and step: the last ones that a run has noted."""
    found = {}
    for rank in range(RANKS):
        for line in open(f"losses-{rank}") if os.path.exists(f"losses-{rank}") else ():
            step, loss = json.loads(line)
            found[rank, step] = loss
    return found


def clean():
    for name in os.listdir():
        os.unlink(name)


undisturbed = {}
for is_async in (False, True):
    codes, _ = run(is_async)
    assert codes == [0] * RANKS, codes
    undisturbed[is_async] = losses()
    assert len(undisturbed[is_async]) == RANKS * STEPS
    clean()

# Most by the count of messages, which are spread over all phases.
PLACES = {
    "making the engine": 1,
    "in a forward, also a recomputed one": 2 * 2 * STEPS,
    "in the loss": STEPS,
    "in step_fn": STEPS,
    "half way through a save": STEPS // 2,
    "between two steps": STEPS,
    "at a message of any kind": 60,
}
drawn = [*PLACES, *["at a message of any kind"] * 3]
assert len(drawn) == 10
for place in drawn:
    killed = 0 if "save" in place else DRAWS.randrange(RANKS)
    count, is_async = DRAWS.randint(1, PLACES[place]), DRAWS.random() < 0.5
    what = f"rank {killed} killed {place}, time {count}, async {is_async}"
    codes, seconds = run(is_async, killed, Moment(place, count))
    wanted = [-signal.SIGKILL if rank == killed else 3 for rank in range(RANKS)]
    assert codes == wanted, (what, codes)
    said = [open(f"said-{rank}").read() for rank in range(RANKS) if rank != killed]
    assert any(f"lost rank {killed}" in text for text in said), (what, said)
    assert seconds < TIMEOUT_S / 2, (what, seconds)
    assert not any(name.startswith("state") and name != "state" for name in os.listdir()) or (
        killed == 0
    ), (what, os.listdir())
    codes, _ = run(is_async)
    assert codes == [0] * RANKS, (what, codes)
    assert losses() == undisturbed[is_async], what
    assert "state.unfinished" not in os.listdir(), what
    print(f"{what}: others ended after {seconds:.2f} s", flush=True)
    clean()
'''


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert len(done.stdout.splitlines()) == 10
