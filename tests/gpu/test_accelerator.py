"""What only an accelerator can show: memory, overlap, out of memory, casts.

Numbers are the matter of tests/transparency, which run on every GPU there is.
"""

import copy
import gc
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.device.accelerator import AcceleratorDevice
from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP, Batch, make_mlp, mlp_batch
from tests.support.reference import plain_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
WIDTH = 2048
NUM_LAYERS = 32
WEIGHT_BYTES = NUM_LAYERS * 4 * (WIDTH * WIDTH + WIDTH)
STAGES_OF_TWO = ModelExecutePlan(
    fwd_plan=[range(start, start + 2) for start in range(0, NUM_LAYERS - 2, 2)],
    bwd_plan=[range(start, start + 2) for start in range(NUM_LAYERS - 2, -1, -2)],
)


def make_wide() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


@pytest.fixture
def one() -> DeviceSet:
    return ACCELERATORS[0]


@pytest.fixture(autouse=True)
def fresh_memory() -> None:
    gc.collect()
    torch.cuda.init()
    torch.cuda.empty_cache()
    for index in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(index)


def test_the_weights_never_are_on_the_device_all_at_once(one: DeviceSet, engines: Engines) -> None:
    """There is no room to spare, in which layers would stay from their forward to their
    backward."""
    engine = engines(make_wide(), one, max_gpu_memory="200MB")
    batch = mlp_batch(rows=8, width=WIDTH)
    run_batch(engine, batch, 2, execute_plan=STAGES_OF_TWO)
    engine.synchronize()
    assert torch.cuda.max_memory_allocated(0) < 0.5 * WEIGHT_BYTES


def test_close_returns_the_devices_memory(one: DeviceSet, engines: Engines) -> None:
    before = torch.cuda.memory_allocated(0)
    engine = engines(make_wide(), one)
    run_batch(engine, mlp_batch(rows=8, width=WIDTH), 2)
    engine.close()
    assert torch.cuda.memory_allocated(0) <= before


@pytest.mark.skipif(len(ACCELERATORS) < 2, reason="needs two GPUs")
def test_every_given_device_works(engines: Engines) -> None:
    engine = engines(make_wide(), ACCELERATORS[1])
    run_batch(engine, mlp_batch(rows=8, width=WIDTH), 3, execute_plan=STAGES_OF_TWO)
    engine.synchronize()
    assert all(
        torch.cuda.max_memory_allocated(index) > WEIGHT_BYTES / NUM_LAYERS for index in range(2)
    )


class Sleeps(nn.Module):
    """Keeps the device busy for a known number of cycles, so that overlap shows whatever the
    card."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)
        return self.linear(hidden)


@pytest.mark.skipif(len(ACCELERATORS) < 2, reason="needs two GPUs")
def test_two_devices_work_at_the_same_time(engines: Engines) -> None:
    """Eight stages and four microbatches: two devices take at most three quarters of what one
    takes."""
    plan = ModelExecutePlan(fwd_plan=[range(i, i + 1) for i in range(8)])

    def seconds(devices: DeviceSet) -> float:
        engine = engines(nn.Sequential(*(Sleeps() for _ in range(8))), devices)
        config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
        rows = torch.randn(8, 16)
        with torch.no_grad():
            engine(rows, roundpipe_run_config=config)
            start = time.perf_counter()
            engine(rows, roundpipe_run_config=config)
        return time.perf_counter() - start

    assert seconds(ACCELERATORS[1]) < 0.75 * seconds(ACCELERATORS[0])


def test_out_of_memory_keeps_its_type_and_the_next_call_works(
    one: DeviceSet, engines: Engines
) -> None:
    class Greedy(nn.Module):
        hungry = False

        def forward(self, hidden: Tensor) -> Tensor:
            if Greedy.hungry:
                torch.empty(1 << 50, dtype=torch.uint8, device=hidden.device)
            return hidden

    engine = engines(nn.Sequential(*make_mlp(), Greedy()), one)
    batch = mlp_batch(rows=6)
    run_batch(engine, batch, 2)
    expected = engine_gradients(engine)
    Greedy.hungry = True
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_batch(engine, batch, 2)
    Greedy.hungry = False
    assert "cuda:0" in "\n".join(caught.value.__notes__)
    one.check(engine_gradients(engine), expected)
    engine.zero_grad()
    run_batch(engine, batch, 2)
    one.check(engine_gradients(engine), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_of_the_caller_holds_on_the_device(
    dtype: torch.dtype, engines: Engines, devices: DeviceSet
) -> None:
    """Compared with the same model under autocast on a GPU; 16-bit products leave a relative error
    of about 1e-2."""
    if devices.kind == "virtual":
        pytest.skip("the oracle is on a GPU")
    model = MLP.make()
    batch = MLP.batch(6, 0)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert output.dtype == dtype
        return batch.loss_fn(output.float(), target)

    on_gpu = Batch((batch.args[0].cuda(),), {}, batch.label.cuda(), loss_fn)
    with torch.autocast("cuda", dtype):
        expected = plain_call(copy.deepcopy(model).cuda(), on_gpu.split(3), loss_fn)
        engine = engines(model, devices)
        loss = run_batch(engine, batch._replace(loss_fn=loss_fn), 3)
    torch.testing.assert_close(loss, expected.loss.cpu(), rtol=1e-2, atol=1e-3)
    for name, gradient in engine_gradients(engine).items():
        torch.testing.assert_close(gradient, expected.gradients[name].cpu(), rtol=2e-2, atol=2e-3)


def test_without_a_device_list_every_accelerator_is_used() -> None:
    with RoundPipe(make_mlp()) as engine:
        run_batch(engine, mlp_batch(rows=12))
        assert len(engine.devices) == torch.cuda.device_count()


def test_outputs_go_to_the_device_that_was_asked_for(one: DeviceSet, engines: Engines) -> None:
    engine = engines(make_mlp(), one)
    with torch.no_grad():
        rows = torch.randn(4, 16)
        on_device = engine(rows, roundpipe_run_config=RoundPipeRunConfig(output_device="cuda:0"))
        on_host = engine(rows)
    assert (on_device.device, on_host.device) == (torch.device("cuda:0"), torch.device("cpu"))
    one.check(on_device, on_host)


def test_a_generators_position_says_whether_something_was_drawn() -> None:
    """As its state does: seeding and setting count too, and what is put back is as if nothing had
    been."""
    device = AcceleratorDevice(torch.device("cuda", 0))
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: torch.rand(3, device=device.torch_device),
        lambda: device.seed(1),
        lambda: device.seed(2),
        lambda: torch.rand(1, device="cpu"),
    ]
    device.seed(1)
    start = device.rng_state()
    for change in changes:
        device.set_rng_state(start)
        before = device.rng_position()
        change()
        has_changed = not torch.equal(device.rng_state(), start)
        assert (device.rng_position() != before) == has_changed
