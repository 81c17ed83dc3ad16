"""Compiled layers on GPUs: plain numbers, also for other lengths; on several, code that lets go of
the interpreter."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx

from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import Batch
from tests.support.reference import plain_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
]  # because C++ takes a quarter of a minute for each graph
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))


def batch_of(length: int) -> Batch:
    return Batch(
        (torch.randn(8, length, WIDTH),), {}, torch.randn(8, length, WIDTH), nn.functional.mse_loss
    )


@pytest.mark.parametrize("on", ACCELERATORS, ids=str)
def test_compiled_layers_give_plain_numbers(
    on: DeviceSet,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compile_, ways = compile_fx.compile_fx, []

    def note(*args: Any, **settings: Any) -> Any:
        if "config_patches" in settings:  # the compiler calls itself too
            ways.append(settings["config_patches"])
        return compile_(*args, **settings)

    monkeypatch.setattr(compile_fx, "compile_fx", note)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    engine = engines(model, on, compile=True)
    for length in (32, 48, 80):
        batch = batch_of(length)
        expected = plain_call(model, batch.split(4), batch.loss_fn)
        engine.zero_grad()
        on.check(run_batch(engine, batch, 4), expected.loss)
        on.check(engine_gradients(engine), expected.gradients)
    assert ways
    assert all(way.get("cpp_wrapper", False) == (on.count > 1) for way in ways)
    assert "without being compiled" not in caplog.text


FIRST_OF_ITS_THREADS = """
import threading
import torch
from roundpipe.device import AcceleratorDevice
from roundpipe.layers.compiler import _Backend

def scaled(hidden, weight):
    return torch.nn.functional.silu(hidden * weight).sin()

device = AcceleratorDevice(torch.device("cuda", 0))
compiled = torch.compile(scaled, backend=_Backend("scaled", in_cpp=True))
hidden = torch.randn(512, 512, device="cuda", requires_grad=True)
weight, gradient = (torch.randn(512, 512, device="cuda") for _ in range(2))
compiled(hidden, weight)
gradients = []

def work():
    device.enter_thread()
    gradients.extend(torch.autograd.grad(compiled(hidden, weight), hidden, gradient))

thread = threading.Thread(target=work)
thread.start()
thread.join()
torch.testing.assert_close(
    gradients, list(torch.autograd.grad(scaled(hidden, weight), hidden, gradient))
)
"""


@pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device")
def test_compiled_code_may_be_the_first_that_a_thread_does() -> None:
    """See [Note: threads without a context]: the worker's forward, and its backward on autograd's
    thread."""
    subprocess.run([sys.executable, "-c", FIRST_OF_ITS_THREADS], check=True)
