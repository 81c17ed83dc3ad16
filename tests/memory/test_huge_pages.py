"""Masters and moments lie in large pages, of which forked processes get no copy, where the system
has such."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from roundpipe import load_checkpoint, save_checkpoint
from roundpipe.memory import huge_pages
from roundpipe.memory.pinning import HostMemory
from roundpipe.optim import SGD, AdamW, LeanAdamW, Lion
from roundpipe.params.placement.held import Held
from tests.support.device_sets import ONE
from tests.support.engines import Engines, run_batch
from tests.support.models import Batch

WIDTH = 1024  # 4 MiB of fp32, 2 of bf16
BATCH = Batch(
    (torch.ones(1, WIDTH),),
    {},
    torch.zeros(1, WIDTH),
    lambda out, target: (out - target).square().sum(),
)


def advice_for(tensor: torch.Tensor) -> set[str]:
    """What the system was told of the memory in the tensor's middle: "hg" for large pages, "dc" for
    none in a fork."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(address, 16) for address in first.split("-"))
            inside = start <= middle < end
        elif inside and first == "VmFlags:":
            return {"hg", "dc"} & set(line.split())
    raise AssertionError("the tensor lies in no mapping")


@pytest.fixture
def needs_linux() -> None:
    if (
        not hasattr(mmap, "MADV_DONTFORK")
        or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    ):
        pytest.skip("this system has no large pages to ask for")


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 1 << 20), (1 << 21, 3), (1 << 19,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_memory_as_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_pages.zeros(shape, dtype)
    torch.testing.assert_close(tensor, torch.zeros(shape, dtype=dtype), rtol=0, atol=0)
    assert type(tensor) is torch.Tensor
    assert tensor.untyped_storage().nbytes() == tensor.nbytes, "else saving it would save more"


@pytest.mark.usefixtures("needs_linux")
@pytest.mark.parametrize("kind", ["buffer", "staging"])
def test_so_does_what_only_the_engine_looks_at(kind: str) -> None:
    """Gradients, and what waits on the host: in small pages, locking them took most of a first
    backward. Weights do not, because a data loader's process may read them."""
    memory = HostMemory("alloc", accelerated=False)
    assert advice_for(getattr(memory, kind)(8 << 20).bytes) == {"hg", "dc"}
    assert advice_for(memory.arena(8 << 20).bytes) == set()


IN_A_FORK = """
import gc, mmap, os, torch
from roundpipe.memory import huge_pages

NUM_BYTES = 1 << 28
gc.disable()
cycle = [huge_pages.zeros((NUM_BYTES,), torch.uint8)]
cycle.append(cycle)
first = cycle[0].data_ptr()
del cycle  # garbage that nobody has collected yet
child = os.fork()
if not child:
    mine = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = torch.frombuffer(mine, dtype=torch.uint8).data_ptr()
    gc.collect()
    mine[NUM_BYTES // 2] = 1
    print("beside" if abs(place - first) >= NUM_BYTES else "there", flush=True)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("needs_linux")
def test_a_fork_that_collects_garbage_keeps_its_own_memory() -> None:
    """What lies in the garbage is not mapped there, and something else may be by then."""
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "there\n"), done.stderr


@pytest.mark.usefixtures("needs_linux")
def test_masters_and_moments_lie_there_also_after_a_resume(
    tmp_path: Path, engines: Engines
) -> None:
    moments = ["exp_avg", "exp_avg_sq"]
    for make, names in (
        (AdamW, moments),
        (LeanAdamW, moments),
        (Lion, ["exp_avg"]),
        (SGD, ["momentum_buffer"]),
    ):
        settings = {"momentum": 0.9} if make is SGD else {}
        first, second = (
            engines(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), ONE) for _ in range(2)
        )
        optimizer, resumed = (
            make(each.optim_parameters(), lr=0.1, **settings) for each in (first, second)
        )
        run_batch(first, BATCH, 1)
        first.step(optimizer.step, is_async=False)
        save_checkpoint(tmp_path / "saved", first, optimizer)
        load_checkpoint(tmp_path / "saved", second, resumed)
        for engine, stepped in ((first, optimizer), (second, resumed)):
            [master] = engine.optim_parameters()
            for tensor in (master, *(stepped.state[master][name] for name in names)):
                assert advice_for(tensor) == {"hg", "dc"}


def test_updates_of_such_memory_are_deferred(engines: Engines) -> None:
    """Nobody else refers to it, though it is not torch's own."""
    engine = engines(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), ONE)
    optimizer = AdamW(engine.optim_parameters(), lr=0.1)
    [master] = engine.optim_parameters()

    def step_fn() -> list[bool]:
        optimizer.step()
        state = optimizer.state[master]
        return [
            isinstance(tensor, Held) for tensor in (master, state["exp_avg"], state["exp_avg_sq"])
        ]

    run_batch(engine, BATCH, 1)
    assert engine.step(step_fn, is_async=False).result() == [True] * 3


@pytest.mark.usefixtures("needs_linux")
def test_no_advice_is_left_where_it_was() -> None:
    """Whatever comes to lie there next must be there in a forked process."""
    before = lines_with("dc")
    tensor = huge_pages.zeros((1 << 22,), torch.float32)
    assert lines_with("dc") > before
    del tensor
    assert lines_with("dc") == before


def lines_with(advice: str) -> int:
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(advice in line.split() for line in lines if line.startswith("VmFlags:"))
