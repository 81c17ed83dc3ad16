"""A process whose engine had just been forgotten aborted at its exit, now and then: "terminate
called without an active exception".

Threads of an engine that is collected go on with the jobs they have. The list of threads to wait
for at exit held only those of engines that were still there, so the interpreter went away under a
thread that was inside torch.
"""

import gc
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from roundpipe import RoundPipe
from roundpipe.threads import worker
from tests.support.engines import run_batch
from tests.support.late_work import LATE, make_pausing
from tests.support.models import mlp_batch
from tests.support.optimizers import PATIENCE_S, Gate

SCRIPT = textwrap.dedent(
    """
    import gc, sys, threading
    import torch
    from torch import nn
    from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

    begun = threading.Semaphore(0)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            begun.release()
            product = torch.rand(500, 500)
            for _ in range(60):
                product = torch.mm(product, product).clamp_(-1, 1)
            return gradient

    class Pause(nn.Module):
        def forward(self, hidden):
            return Slow.apply(hidden)

    torch.set_num_threads(1)
    plan = ModelExecutePlan([range(2)], [range(2, 3), range(2)])
    engines = []
    for _ in range(3):
        engine = RoundPipe(nn.Sequential(nn.Linear(4, 4), Pause(), nn.Linear(4, 4)), devices=2)
        config = RoundPipeRunConfig(execute_plan=plan, num_microbatch=4)
        engine.forward_backward(
            (torch.rand(8, 4),), loss_fn=lambda output, _: output.sum(), run_config=config
        )
        engines.append(engine)
        begun.acquire()
    if sys.argv[1] == "forgotten":
        del engine
        engines.clear()
        gc.collect()
    print("left")
    """
)


def test_threads_of_a_forgotten_engine_are_waited_for_at_exit() -> None:
    """As long as they have something to do."""
    before = set(threading.enumerate())
    gate = Gate()
    engine = RoundPipe(make_pausing(gate), devices=2)
    run_batch(engine, mlp_batch(rows=6), 2, execute_plan=LATE)
    gate.wait_reached()
    started = set(threading.enumerate()) - before
    del engine
    gc.collect()
    assert started <= worker._threads.keys()
    gate.open()
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["forgotten", "kept"])
def test_the_interpreter_waits_for_threads_inside_torch(engine: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, engine],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        cwd=Path(__file__).parent,
    )
    assert (process.returncode, process.stdout.strip()) == (0, "left"), process.stderr
