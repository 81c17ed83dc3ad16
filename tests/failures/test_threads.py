"""Several threads that evaluate with one engine: each call is whole, and none waits for another
forever."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.threads.worker import Job, Worker
from tests.support.device_sets import TWO
from tests.support.engines import Engines
from tests.support.optimizers import PATIENCE_S

NUM_LAYERS, NUM_THREADS, NUM_CALLS = 4, 4, 25
ONE_EACH = ModelExecutePlan(fwd_plan=[range(layer, layer + 1) for layer in range(NUM_LAYERS)])


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads take turns at any moment, above all between two devices' shares of a call."""
    before, submit = sys.getswitchinterval(), Worker.submit

    def give_way(worker: Worker, job: Job) -> None:
        submit(worker, job)
        time.sleep(0)  # lets another thread run, waits for nothing

    monkeypatch.setattr(Worker, "submit", give_way)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_calls_of_several_threads_do_not_wait_for_each_other(engines: Engines) -> None:
    """Each stage runs both devices several times; handed out in another order on each they
    would."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_LAYERS)))
    engine = engines(
        model, TWO, model_run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=ONE_EACH)
    )
    inputs = torch.randn(4, 8)
    with torch.no_grad():
        expected = engine(inputs)
    found: list[torch.Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            found.extend(engine(inputs) for _ in range(NUM_CALLS))

    threads = [threading.Thread(target=evaluate, daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) == NUM_THREADS * NUM_CALLS
    assert all(torch.equal(outputs, expected) for outputs in found)


COLLECTING = """
import gc, sys, threading, time, weakref
import torch
from roundpipe.device.virtual import VirtualDevice

class Circle:
    def __init__(self):
        self.itself = self
        # Gives the interpreter away in the middle of a collection.
        weakref.finalize(self, time.sleep, 0)

def read():
    for _ in range(1000):
        gc.disable()
        Circle(), Circle(), Circle()
        gc.enable()  # so that the next object made, the state, begins a collection
        device.rng_state()

device = VirtualDevice(0)
sys.setswitchinterval(1e-6)
gc.set_threshold(1)
threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


def test_a_collection_while_a_generator_is_read_stops_nobody() -> None:
    """torch makes a Python object under the generator's mutex. A process of its own, for this one
    would stop too."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECTING],
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=True,
    )
    assert done.stdout == "done\n"
