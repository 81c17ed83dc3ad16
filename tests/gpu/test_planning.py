"""What plans are made from on an accelerator: times from its own events, memory as it says, stages
in shares."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.device import AcceleratorDevice
from tests.support.device_sets import ACCELERATORS
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import mlp_batch
from tests.support.reference import plain_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
MICROBATCHES = 4
CONFIG = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
CYCLES = 10_000_000


class Sleeps(nn.Module):
    """Keeps the device busy for a known number of cycles."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self._cycles = cycles

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.is_cuda:
            torch.cuda._sleep(self._cycles)
        return self.linear(hidden)


def make_sleepers(*multiples: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Sleeps(CYCLES * multiple) for multiple in multiples))


def call(engine: RoundPipe, count: int, plan: ModelExecutePlan | None = None) -> None:
    for _ in range(count):
        engine.zero_grad()
        run_batch(engine, mlp_batch(8), execute_plan=plan)
        engine.synchronize()


def test_layers_are_timed_by_the_devices_own_events(engines: Engines) -> None:
    """Not by when they were queued, which takes the same for all."""
    engine = engines(make_sleepers(1, 4, 2, 1), ACCELERATORS[0], model_run_config=CONFIG)
    call(engine, 5, ModelExecutePlan([range(2)], [range(2, 4), range(2)]))
    costs = engine.planner.measured().costs()
    # Half of each factor, because other processes may share the device.
    assert costs.forward[1] > 2 * costs.forward[0]
    assert costs.forward[2] > costs.forward[3]
    assert costs.recompute[1] > 2 * costs.recompute[0]
    assert max(costs.backward) < min(costs.forward), "a sleep was counted with a backward"


@pytest.fixture
def whole_device_afterwards() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.usefixtures("whole_device_afterwards")
def test_the_limit_is_the_least_of_what_is_free_allowed_and_asked_for(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    # Other processes may be taking memory at this moment: here they have what they had.
    was_free = torch.cuda.mem_get_info(0)[0] + torch.cuda.memory_reserved(0)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (was_free - torch.cuda.memory_reserved(0), total)
    )
    (device,) = engines(make_sleepers(1), ACCELERATORS[0]).devices
    free = device.limit_bytes()
    taken = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    assert device.limit_bytes() == pytest.approx(free - taken.nbytes, abs=2**27)
    torch.cuda.set_per_process_memory_fraction(0.25, 0)
    assert device.limit_bytes() <= 0.25 * total - taken.nbytes
    (limited,) = engines(make_sleepers(1), ACCELERATORS[0], max_gpu_memory=f"{2**28}B").devices
    assert limited.limit_bytes() == 2**28


@pytest.mark.skipif(len(ACCELERATORS) < 2, reason="needs two GPUs")
def test_two_devices_share_the_stages_of_a_model_that_fits(engines: Engines) -> None:
    """From the call after the one that showed that no forward writes anything."""
    model = make_sleepers(1, 1, 1, 1)
    batch = mlp_batch(8)
    expected = plain_call(copy.deepcopy(model), batch.split(MICROBATCHES), batch.loss_fn)
    engine = engines(model, ACCELERATORS[1], model_run_config=CONFIG)
    call(engine, 6)
    assert repr(engine.execute_plan) == "ModelExecutePlan(X 0-3 x2)"
    ACCELERATORS[1].check(engine_gradients(engine), expected.gradients)


def test_inputs_that_wait_on_the_host_come_back_as_they_were(engines: Engines) -> None:
    """A device that may hold next to nothing spills every kept input."""
    model = make_sleepers(1, 1, 1, 1)
    batch = mlp_batch(8)
    expected = plain_call(copy.deepcopy(model), batch.split(MICROBATCHES), batch.loss_fn)
    full = SimpleNamespace(argument=[AcceleratorDevice(torch.device("cuda", 0), max_bytes=1)])
    engine = engines(model, full, model_run_config=CONFIG)  # type: ignore[arg-type]
    call(engine, 3, ModelExecutePlan([range(1), range(1, 3)], [range(3, 4), range(1, 3), range(1)]))
    assert engine.statistics()["spill_bytes"] > 0
    ACCELERATORS[0].check(engine_gradients(engine), expected.gradients)
