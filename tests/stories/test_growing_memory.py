"""Host memory climbed with every step, every evaluation and every checkpoint.

Sixty steps whose batches all have another size, with evaluations and checkpoints: the memory of
this process after the last step must be that after the tenth. Caches by shape and kept page-locked
buffers never shrink, and would show here.

Source: unslothai/unsloth#2328, deepspeedai/DeepSpeed#3582.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.memory.pinning import HostArena
from tests.support import ROOT
from tests.support.device_sets import TWO
from tests.support.engines import Engines, run_batch
from tests.support.models import make_mlp, mlp_batch
from tests.support.optimizers import Gate

C = ctypes.CDLL(None)
WIDTH, NUM_LINEARS = 1024, 8
WEIGHT_BYTES = NUM_LINEARS * (WIDTH + 1) * WIDTH * 4
NUM_STEPS, MEASURED_FROM = 60, 10
SMALL = 20 * 2**20
# Plans follow measured times, and each needs other slots; what a plan needs is not what grows here.
ONE_PLAN = RoundPipeRunConfig(execute_plan=ModelExecutePlan([range(7)], [range(7, 15), range(7)]))
MEASURABLE = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"
)


def own_bytes() -> int:
    """Memory that is this process's own: the allocator's, and mappings such as those that are
    page-locked. Not what was freed and is still the allocator's."""
    for _ in range(2):
        gc.collect()
    if hasattr(C, "malloc_trim"):
        C.malloc_trim(0)
    fields = dict(
        line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) * 1024


def highest_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def rows_of(number: int) -> int:
    """Another size at every step, both growing and shrinking."""
    return 8 + number * 17 % 60


def use_all_buffers(engine: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
    """An asynchronous step may still use the gradients of one call while those of the next offload:
    two sets of memory.

    Whether they are ever both needed depends on timing, so it is made sure here.
    """
    batch = mlp_batch(rows=8, width=WIDTH)
    waits = batch._replace(
        args=(batch.args[0].requires_grad_(),)
    )  # whose gradient comes last, so the call waits
    run_batch(engine, waits, 2)
    engine.step(optimizer.step, is_async=False)
    run_batch(engine, waits, 2)
    gate = Gate()

    def step_fn() -> None:
        gate.pause()
        optimizer.step()
        optimizer.zero_grad()

    engine.step(step_fn)
    gate.wait_reached()
    run_batch(engine, waits, 2)
    gate.open()
    engine.step(optimizer.step)


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


def own_growth(folder: Path) -> dict[str, int]:
    """What this test is about, in a process of its own: whatever ran before leaves memory that may
    be used again."""
    before = own_bytes()
    arena = HostArena(WEIGHT_BYTES, lock=False)
    arena.bytes.fill_(1)
    with_arena = own_bytes()
    kept = torch.ones(WEIGHT_BYTES, dtype=torch.uint8)
    seen = {"mapping": with_arena - before, "allocation": own_bytes() - with_arena}
    del arena, kept
    with RoundPipe(make_mlp(NUM_LINEARS, WIDTH), devices=2, model_run_config=ONE_PLAN) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-3, momentum=0.9)
        use_all_buffers(engine, optimizer)
        measured = train(engine, optimizer, folder)
    return seen | {
        str(number): measured[number] - measured[MEASURED_FROM] for number in (30, NUM_STEPS)
    }


@pytest.mark.slow
@MEASURABLE
def test_memory_after_the_last_step_is_that_after_the_tenth(tmp_path: Path) -> None:
    """A copy of the weights that is kept by mistake, in either kind of memory, would be above the
    limit."""
    script = (
        f"import json, sys, pathlib; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch; torch.set_num_threads(1)\n"
        f"from {__name__} import own_growth\n"
        f"print(json.dumps(own_growth(pathlib.Path({str(tmp_path)!r}))))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ
        | {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)},  # or freed tensors stay on the heap, by chance
    )
    assert process.returncode == 0, process.stderr
    grown = json.loads(process.stdout)
    limit = 0.1 * WEIGHT_BYTES
    assert grown["mapping"] > limit
    assert grown["allocation"] > limit
    for number in (30, NUM_STEPS):
        assert grown[str(number)] < limit, (
            f"{grown[str(number)] / 2**20:.0f} MiB more after step {number}"
        )


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
    """Two fp32 moments: 8 bytes a parameter; masters 4, and gradients no more than they offload
    in."""
    engine = engines(make_mlp(2, WIDTH), TWO)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=1e-3)
    for _ in range(3):
        run_batch(engine, mlp_batch(rows=8, width=WIDTH), 2)
        engine.step(optimizer.step)
    engine.synchronize()
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    state = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if value.dim()
    )
    assert state == 8 * count
    assert engine.statistics()["master_bytes"] == 4 * count


PLANS = {
    "fused": ModelExecutePlan([], [range(15)]),
    "staged": ModelExecutePlan([range(7)], [range(7, 15), range(7)]),
}


def a_call(engine: RoundPipe, plan: ModelExecutePlan) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    batch = mlp_batch(rows=8)
    engine.forward_backward(batch.args, label=batch.label, loss_fn=batch.loss_fn, run_config=config)


def a_call_by_layer(engine: RoundPipe, plan: ModelExecutePlan) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan, recompute_grain="layer")
    batch = mlp_batch(rows=8)
    engine.forward_backward(batch.args, label=batch.label, loss_fn=batch.loss_fn, run_config=config)


def a_backward_of_the_users_own(engine: RoundPipe, plan: ModelExecutePlan) -> None:
    batch = mlp_batch(rows=8)
    output = engine(*batch.args, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    batch.loss_fn(output, batch.label).backward()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("call", [a_call, a_call_by_layer, a_backward_of_the_users_own])
def test_nothing_waits_for_the_garbage_collector(
    call: Callable[[RoundPipe, ModelExecutePlan], None],
    plan: str,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors in circles of references stay until a full collection comes: on a GPU gigabytes of
    gradients a step."""
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # bound to a replica, as a compiled one is
    engine = engines(make_mlp(num_linears=8), TWO, compile=True)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(3):  # everything is learnt
        call(engine, PLANS[plan])
        engine.step(optimizer.step, is_async=False)
    engine.synchronize()
    with only_counting_references() as garbage:
        call(engine, PLANS[plan])
        engine.step(optimizer.step, is_async=False)
        engine.synchronize()
    assert [thing.shape for thing in garbage if issubclass(type(thing), torch.Tensor)] == []


@contextmanager
def only_counting_references() -> Iterator[list[Any]]:
    """Nothing is collected inside; afterwards the list has what a collection would have freed."""
    gc.collect()
    gc.disable()
    found: list[Any] = []
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.extend(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
