"""The notebooks are stored with the outputs of a run without errors, and a training cell that is
interrupted can be run again: in a real kernel, with the interrupt that the ■ button
sends."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from tests.support import ROOT

FOLDER = ROOT / "notebooks"
PATIENCE_S = 90

SETUP = f"""
import signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.support.trainers import logged, make_trainer, token_rows
from tests.support.models import make_llama
from roundpipe_hf import RoundPipeTrainer

arrived = threading.Event()
hangs_at = 0

def interrupt(*_):
    if not arrived.is_set():  # a second one would interrupt the kernel's report of the first
        arrived.set()
        raise KeyboardInterrupt

def look(*_):  # runs in a worker, in the middle of a step
    global hangs_at
    hangs_at -= 1
    if hangs_at == 0:
        print("hanging", flush=True)
        arrived.wait({PATIENCE_S})
"""
CELL = """
signal.signal(signal.SIGINT, interrupt)
model = make_llama(tied=False)
model.model.layers[1].mlp.register_forward_hook(look)
trainer = make_trainer(RoundPipeTrainer, model, token_rows(12), devices=2)
trainer.train()
print([entry["loss"] for entry in logged(trainer)[:-1]])
"""
THREADS = """
import gc
gc.collect()
print(sorted(
    thread.name for thread in threading.enumerate() if thread.name.startswith("roundpipe")
))
"""


class Ran(NamedTuple):
    """What a cell printed, and the name of the error it ended with."""

    printed: list[str]
    error: str | None


class Kernel:
    def __init__(self, folder: Path) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def run(self, cell: str, *, interrupt_at: str | None = None) -> Ran:
        request = self.client.execute(cell)
        ran = Ran([], None)
        is_interrupting = False
        while True:
            if is_interrupting:
                # Again until it has an effect: a signal that comes just before a thread begins to
                # wait wakes nobody.
                self.manager.interrupt_kernel()
            try:
                message: dict[str, Any] = self.client.get_iopub_msg(
                    timeout=1 if is_interrupting else PATIENCE_S
                )
            except queue.Empty:
                assert is_interrupting, f"the cell went silent after {ran.printed}"
                continue
            content = message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if content.get("name") == "stdout":
                ran.printed.extend(content["text"].split("\n"))
                is_interrupting = is_interrupting or (
                    interrupt_at is not None and interrupt_at in content["text"]
                )
            elif message["msg_type"] == "error":
                ran, is_interrupting = ran._replace(error=content["ename"]), False
            elif content.get("execution_state") == "idle":
                return ran

    def last_line(self, cell: str) -> str:
        ran = self.run(cell)
        assert ran.error is None, ran
        return [line for line in ran.printed if line][-1]


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_outputs_of_every_cell_are_stored(path: Path) -> None:
    """In order, without errors: `make notebooks` has run it as it is."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(output.output_type != "error" for cell in cells for output in cell.outputs)
    assert any(cell.outputs for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interrupted_training_cell_can_be_run_again(kernel: Kernel) -> None:
    """It ends in KeyboardInterrupt; run again it gives the losses of a kernel that nobody
    interrupted, and the first run's threads are gone."""
    assert kernel.run(SETUP).error is None
    expected = kernel.last_line(CELL)
    assert kernel.run("trainer.model_wrapped.close(); del trainer, model").error is None
    assert kernel.last_line(THREADS) == "[]"

    interrupted = kernel.run("hangs_at = 8\n" + CELL, interrupt_at="hanging")
    assert interrupted.error == "KeyboardInterrupt"
    assert kernel.last_line(CELL) == expected
    threads = kernel.last_line(THREADS)
    # And again, without an interrupt.
    assert kernel.last_line("arrived.clear()\n" + CELL) == expected
    assert kernel.last_line(THREADS) == threads
