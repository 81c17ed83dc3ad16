"""Ctrl-C while an engine closes: it counts as closed, and its threads end by themselves."""

import threading

import pytest

from roundpipe import RoundPipe
from roundpipe.errors import ClosedError
from roundpipe.threads.worker import Worker
from tests.support.engines import run_batch
from tests.support.models import make_mlp, mlp_batch
from tests.support.optimizers import PATIENCE_S


@pytest.mark.parametrize(
    "interrupted",
    ["roundpipe-worker-virtual:0", "roundpipe-worker-virtual:1", "roundpipe-optimizer"],
)
def test_threads_end_without_being_waited_for(
    interrupted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    engine = RoundPipe(make_mlp(), devices=2)
    batch = mlp_batch(rows=6)
    run_batch(engine, batch, 2)
    join = Worker.join

    def interrupt(worker: Worker, timeout: float | None = None) -> None:
        if interrupted in repr(worker):
            raise KeyboardInterrupt
        join(worker, timeout)

    monkeypatch.setattr(Worker, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
    assert set(threading.enumerate()) == before
    with pytest.raises(ClosedError):
        run_batch(engine, batch, 2)
