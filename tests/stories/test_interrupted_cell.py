"""Interrupting a notebook cell left workers running and memory held; the kernel had to be
restarted.

A cell is `exec`uted, interrupted inside a call or inside an update, and run again in the same
namespace, as a notebook does. The second run must give what a first one gives, and nothing of the
interrupted one may be left.

Source: pytorch/pytorch#37726, joblib/joblib#1304.
"""

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from roundpipe import RoundPipe
from roundpipe.runtime.call import Call
from tests.support import ROOT
from tests.support.injection import Interruption
from tests.support.models import make_mlp, mlp_batch, squared_error_over
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import Reference, weights_of

NUM_STEPS = 4
CELL = compile(
    textwrap.dedent(
        """
        model = make_mlp()
        engine = RoundPipe(model, devices=count)
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)

        def loss_fn(output, target):
            reach("call")
            return squared_error_over(6)(output, target)

        def step_fn():
            reach("update")
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for number in range(4):
            batch = mlp_batch(rows=6, seed=number)
            losses.append(
                float(engine.forward_backward(batch.args, label=batch.label, loss_fn=loss_fn))
            )
            engine.step(step_fn, is_async=is_async)
        engine.synchronize()
        """
    ),
    "<cell>",
    "exec",
)


@contextmanager
def told() -> Iterator[threading.Event]:
    """Set once a call knows that it is over."""
    event, fail = threading.Event(), Call.fail

    def noted(call: Call, error: BaseException) -> None:
        fail(call, error)
        event.set()

    with mock.patch.object(Call, "fail", noted):
        yield event


class Notebook:
    """One namespace and what cells find in it."""

    def __init__(self, count: int, *, is_async: bool) -> None:
        self.namespace: dict[str, Any] = {
            "RoundPipe": RoundPipe,
            "torch": torch,
            "make_mlp": make_mlp,
            "mlp_batch": mlp_batch,
            "squared_error_over": squared_error_over,
            "count": count,
            "is_async": is_async,
            "reach": self._reach,
        }
        self._is_async, self._has_waited = is_async, False
        self._where, self._left, self._interruption = "", 0, Interruption()
        self._end_of_hang = threading.Event()

    def run(self) -> list[float]:
        exec(CELL, self.namespace)
        return self.namespace["losses"]

    def run_interrupted(self, where: str) -> None:
        """The fifth microbatch, or the second update, hangs until Ctrl-C has come.

        A microbatch until its call knows of it, because none is to be begun then; an asynchronous
        update until the cell has been left, because nobody in it need wait.
        """
        is_left = threading.Event()
        with Interruption() as self._interruption, told() as is_told:
            self._end_of_hang = is_told if where == "call" else is_left
            if where == "update" and not self._is_async:
                is_left.set()  # because the caller waits for it
            self._where, self._left = where, 5 if where == "call" else 2
            with pytest.raises(KeyboardInterrupt):
                self.run()
            num_left, has_waited = self._left, self._has_waited
            is_left.set()
        assert not has_waited, "the interrupt had no effect while this hung"
        assert num_left == 0, f"{-num_left} microbatches were begun after the interrupt"

    def _reach(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if self._left == 0:
                self._interruption.hang()
                self._has_waited = not self._end_of_hang.wait(PATIENCE_S)

    @property
    def engine(self) -> RoundPipe:
        return self.namespace["engine"]


def plain_losses(count: int, *, is_async: bool) -> list[float]:
    """What the cell gives where nothing is pipelined at all. The default is one microbatch more
    than devices."""
    reference = Reference(
        make_mlp(), lambda params: torch.optim.SGD(params, lr=0.1), staleness=int(is_async)
    )
    losses = []
    for number in range(NUM_STEPS):
        batch = mlp_batch(rows=6, seed=number)
        losses.append(float(reference.forward_backward(batch.split(count + 1), batch.loss_fn)))
        reference.step()
    return losses


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("roundpipe")}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", ["call", "update"])
def test_an_interrupted_cell_can_be_run_again(where: str, is_async: bool, count: int) -> None:
    before = engine_threads()
    notebook = Notebook(count, is_async=is_async)
    notebook.run_interrupted(where)
    first = engine_threads() - before
    assert first
    losses = notebook.run()
    assert losses == plain_losses(count, is_async=is_async)
    gc.collect()  # the first engine, whose name in the namespace is the second one's now
    for thread in first:
        thread.join(PATIENCE_S)
    assert len(engine_threads() - before) == len(first), "the first run's threads are still there"
    notebook.engine.close()
    assert engine_threads() == before


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", ["call", "update"])
def test_nobody_writes_weights_after_an_interrupt(where: str, count: int) -> None:
    """Steps were synchronous: what the model holds once the interrupt is handled is what it holds
    for good."""
    notebook = Notebook(count, is_async=False)
    notebook.run_interrupted(where)
    notebook.engine.synchronize()
    weights = weights_of(notebook.namespace["model"])
    threads = engine_threads()
    notebook.engine.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    for name, value in weights_of(notebook.namespace["model"]).items():
        assert torch.equal(value, weights[name])


@pytest.mark.parametrize("count", [1, 2])
def test_the_interrupted_engine_goes_on(count: int) -> None:
    """It need not be thrown away: three steps were to come, and come now, as if nothing had
    been."""
    notebook = Notebook(count, is_async=False)
    notebook.run_interrupted("call")
    namespace = notebook.namespace
    losses = list(namespace["losses"])
    for number in range(len(losses), NUM_STEPS):
        batch = mlp_batch(rows=6, seed=number)
        losses.append(
            float(
                notebook.engine.forward_backward(
                    batch.args, label=batch.label, loss_fn=batch.loss_fn
                )
            )
        )
        notebook.engine.step(namespace["step_fn"], is_async=False)
    assert losses == plain_losses(count, is_async=False)
    notebook.engine.close()


@pytest.mark.timeout(120)
def test_an_interrupted_process_can_exit() -> None:
    """Ctrl-C during a call, and no `close()`: the process ends by itself."""
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(ROOT)!r})
        from {__name__} import Notebook
        try:
            notebook = Notebook(2, is_async=True)
            notebook.run_interrupted("call")
        finally:
            print("left")
        """
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (process.returncode, process.stdout.strip()) == (0, "left"), process.stderr
