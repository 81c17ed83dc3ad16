"""Engines, and what listens to their steps, are found by any thread for as long as they are
there."""

import gc
import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from roundpipe.step import context
from roundpipe.threads.weak_registry import WeakRegistry
from tests.support.optimizers import PATIENCE_S


def test_what_is_alive_is_found_in_the_order_in_which_it_came() -> None:
    class Thing:
        pass

    living, things = WeakRegistry[Thing](), [Thing() for _ in range(4)]
    for thing in things:
        living.add(thing)
    del things[1], thing
    gc.collect()
    assert list(living) == things
    living.clear()
    assert list(living) == []


def test_listeners_made_by_other_threads_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss scalers, say: they come and go while a step is told to all of them. Whoever stays hears
    of every step."""

    class Listener:
        heard = 0

        def step_called(self, *_: Any) -> None:
            self.heard += 1

    monkeypatch.setattr(context, "_listeners", type(context._listeners)())
    before, is_over = sys.getswitchinterval(), threading.Event()

    def listen() -> None:
        while not is_over.is_set():
            context.listen(Listener())

    threads = [threading.Thread(target=listen, daemon=True) for _ in range(2)]
    kept = [Listener() for _ in range(200)]
    for listener in kept:
        context.listen(listener)
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            context.tell_called(None, None, False)  # type: ignore[arg-type]
    finally:
        is_over.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join(PATIENCE_S)
    assert {listener.heard for listener in kept} == {3000}


FORKING = """
import os, sys, threading
import torch
from torch import nn
from roundpipe import OptimizerCtx, RoundPipe

model, is_over = nn.Sequential(nn.Linear(2, 2)), threading.Event()
engine = RoundPipe(model, devices=1)
engine.forward_backward((torch.ones(1, 2),), loss_fn=lambda outputs, _: outputs.sum())
engine._steps._jobs.submit(is_over.wait)
child = os.fork()
if child == 0:
    with OptimizerCtx(), RoundPipe(nn.Sequential(model[0]), devices=1) as other:
        other.synchronize()
    os._exit(7)
_, status = os.waitpid(child, 0)
is_over.set()
engine.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_the_other_ones_engines() -> None:
    """None of their threads is there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE_S,
    )
    assert done.stdout == "7\n", done.stderr
