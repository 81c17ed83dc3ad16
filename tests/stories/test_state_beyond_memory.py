"""Full fine-tuning took 16 bytes of host memory per parameter, 12 of them for what is touched once
a step, so that models were refused whose state would have fit onto a disk.

A process trains with state on a disk and says how much memory is its own: less than one with state
in memory by the bytes of that state, and what of the file is in memory is bounded.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

WIDTH, NUM = 1024, 12  # 4 MiB of fp32 each
STATE = NUM * WIDTH**2 * 12
BOUND = 2 * WIDTH**2 * 12
PROGRAM = """
import json, sys
import torch
from pathlib import Path
from torch import nn
import roundpipe
from roundpipe.memory import state_file
from roundpipe.step import state_pages

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(kind))

folder, make, width, num, bound = json.loads(sys.argv[1])
state_pages.free_host_bytes = lambda: 0
state_pages.AHEAD_BYTES = state_pages.BEHIND_BYTES = state_file.FILLED_BYTES = bound
state_pages.TOGETHER_BYTES = 1
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(num)])
files, most = resident("RssFile"), 0
with roundpipe.RoundPipe(
    model, devices=roundpipe.virtual(1), optimizer_state_dir=folder, pin_model="off"
) as engine:
    optimizer = {"torch": torch.optim.AdamW, "ours": roundpipe.optim.AdamW}[make](
        engine.optim_parameters()
    )
    pages = engine._steps._write_back._pages
    reach = pages and pages.reach
    def reached(masters):
        global most
        reach(masters)
        most = max(most, resident("RssFile"))
    if pages:
        pages.reach = reached
    x = torch.ones(2, width)
    for _ in range(2):
        engine.forward_backward(
            (x,), label=x, loss_fn=lambda out, y: (out - y).square().mean()
        )
        engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    print(json.dumps({"own": resident("RssAnon"), "file": most - files}))
"""


@pytest.fixture(scope="module")
def in_memory() -> dict[str, int]:
    return run(None, "ours")


def run(folder: Path | None, make: str) -> dict[str, int]:
    given = json.dumps([folder and str(folder), make, WIDTH, NUM, BOUND])
    # So that the allocator gives back what is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's status")
@pytest.mark.parametrize("make", [pytest.param("torch", marks=pytest.mark.slow), "ours"])
def test_own_memory_is_less_by_the_state(
    make: str, tmp_path: Path, in_memory: dict[str, int]
) -> None:
    after = run(tmp_path, make)
    assert in_memory["own"] - after["own"] >= 0.95 * STATE
    # Ahead, behind, those passed now and what is more than waits behind, and late readers'.
    assert after["file"] <= 2 * BOUND + 5 * WIDTH**2 * 12
