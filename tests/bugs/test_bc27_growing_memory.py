"""BC-27. Host memory climbed with every step, every evaluation and every checkpoint.

Sixty steps whose batches all have another size, with evaluations and checkpoints: the memory of this process after the
last step must be that after the tenth. Caches by shape and kept page-locked buffers never shrink, and would show here.

Source: unslothai/unsloth#2328, deepspeedai/DeepSpeed#3582.
"""

import gc
from pathlib import Path

import pytest
import torch

from device_sets import TWO, DeviceSet
from engines import Engines, run_batch
from models import make_mlp, mlp_batch
from roundpipe import RoundPipe

WIDTH, NUM_LINEARS = 1024, 8
WEIGHT_BYTES = NUM_LINEARS * (WIDTH + 1) * WIDTH * 4
NUM_STEPS, MEASURED_FROM = 60, 10
SMALL = 20 * 2**20
MEASURABLE = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")


def own_bytes() -> int:
    """Memory that is this process's own: the allocator's, and mappings such as those that are page-locked."""
    for _ in range(2):
        gc.collect()
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024


def highest_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def rows_of(number: int) -> int:
    """Another size at every step, both growing and shrinking."""
    return 8 + number * 17 % 60


def train(engine: RoundPipe, optimizer: torch.optim.Optimizer, folder: Path) -> dict[int, int]:
    """The memory after some of the steps."""
    measured = {}
    for number in range(1, NUM_STEPS + 1):
        batch = mlp_batch(rows=rows_of(number), seed=number, width=WIDTH)
        run_batch(engine, batch, 2)
        engine.step(optimizer.step, is_async=number % 2 == 0)
        if number % 10 == 0:
            with torch.no_grad():
                engine(*batch.args)
        if number % 20 == 0:
            torch.save(engine.state_dict(), folder / f"{number}.pt")
        if number in (MEASURED_FROM, 30, NUM_STEPS):
            engine.synchronize()
            measured[number] = own_bytes()
    return measured


@MEASURABLE
@pytest.mark.parametrize("devices", [TWO], ids=str)
def test_memory_after_the_last_step_is_that_after_the_tenth(
    devices: DeviceSet, engines: Engines, tmp_path: Path
) -> None:
    engine = engines(make_mlp(NUM_LINEARS, WIDTH), devices)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-3, momentum=0.9)
    measured = train(engine, optimizer, tmp_path)
    for number in (30, NUM_STEPS):
        grown = measured[number] - measured[MEASURED_FROM]
        assert grown < 0.05 * WEIGHT_BYTES + SMALL, f"{grown / 2**20:.0f} MiB more after step {number}"


@MEASURABLE
def test_the_measure_sees_one_copy_of_the_gradients(engines: Engines) -> None:
    """A buffer that is kept by mistake, of either kind of memory, is above the limit of the test before."""
    from roundpipe.memory.pinning import HostArena

    before = own_bytes()
    arena = HostArena(WEIGHT_BYTES, lock=False)
    arena.bytes.fill_(1)
    with_arena = own_bytes()
    kept = torch.ones(WEIGHT_BYTES, dtype=torch.uint8)
    with_both = own_bytes()
    for grown in (with_arena - before, with_both - with_arena):
        assert grown > 0.05 * WEIGHT_BYTES + 0.5 * SMALL
    del kept, arena


@MEASURABLE
def test_saving_takes_at_most_one_copy(engines: Engines, tmp_path: Path) -> None:
    clear = Path("/proc/self/clear_refs")
    engine = engines(make_mlp(NUM_LINEARS, WIDTH), TWO)
    run_batch(engine, mlp_batch(rows=8, width=WIDTH), 2)
    engine.synchronize()
    try:
        clear.write_text("5")  # the highest so far becomes what is there now
    except OSError:
        pytest.skip("this system does not let the process forget its highest memory")
    before = highest_bytes()
    torch.save(engine.state_dict(), tmp_path / "model.pt")
    assert highest_bytes() - before < WEIGHT_BYTES + SMALL


def test_optimizer_state_is_as_large_as_documented(engines: Engines) -> None:
    """Two fp32 moments: 8 bytes a parameter; masters 4, and gradients no more than they land in."""
    engine = engines(make_mlp(2, WIDTH), TWO)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=1e-3)
    for _ in range(3):
        run_batch(engine, mlp_batch(rows=8, width=WIDTH), 2)
        engine.step(optimizer.step)
    engine.synchronize()
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.dim())
    assert state == 8 * count
    assert engine.statistics()["master_bytes"] == 4 * count
