"""A base that does not fit into memory streams: what a step reads of it is no more than has to be
read, and numbers are those of weights in memory.

`Disk` stands for the system: it counts what is read into memory and what memory holds.
"""

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.engine import state
from roundpipe.errors import ConfigError
from roundpipe.memory.mmap import FileMappings
from roundpipe.memory.page_cache import PageCache, Stretch
from roundpipe.memory.pinning import HostMemory
from roundpipe.params.working import ParameterStore
from roundpipe.transfer import read_ahead as read_ahead_module
from roundpipe.transfer.read_ahead import ReadAhead, kept_of
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.optimizers import PATIENCE_S
from tests.support.reference import weights_of

NUM_LAYERS, WIDTH = 12, 32
LAYER_BYTES = 4 * (WIDTH**2 + WIDTH)
BASE_BYTES = NUM_LAYERS * LAYER_BYTES
EVERYTHING = list(range(NUM_LAYERS))


class Disk(PageCache):
    """Has ``available`` bytes of memory for the engine, of which it takes 7/8."""

    def __init__(self, available: float) -> None:
        super().__init__()
        self.available = int(available)
        self.memory: dict[Stretch, None] = {}
        self.let_go_of: list[Stretch] = []
        self.num_read = self.most = 0
        self._lock = threading.Lock()

    def room(self) -> int:
        return self.available

    def read_whole(self, stretch: Stretch) -> None:
        with self._lock:
            if stretch not in self.memory:
                self.memory[stretch] = None
                self.num_read += stretch.num_bytes
            self.most = max(self.most, sum(held.num_bytes for held in self.memory))

    def read(self, start: int, num_bytes: int) -> bool:
        self.read_whole(Stretch(start, num_bytes, self.path))
        return True

    def let_go(self, stretch: Stretch) -> None:
        with self._lock:
            self.let_go_of.append(stretch)
            self.memory.pop(stretch, None)

    path = ""


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    for linear in linears:
        linear.requires_grad_(False)
    return nn.Sequential(*linears)


def mapped(model: nn.Module, path: Path) -> nn.Module:
    save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path), assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ParameterStore:
    path = tmp_path / "model.safetensors"
    monkeypatch.setattr(Disk, "path", str(path))
    layers = list(mapped(make_model(), path))
    return ParameterStore(layers, HostMemory("off", accelerated=False))


class Run:
    """A `ReadAhead` that is told what calls do, and done with each message before the next."""

    def __init__(self, store: ParameterStore, disk: Disk) -> None:
        self.disk, self._store = disk, store
        self.read_ahead = ReadAhead(store, FileMappings.now(), disk)

    def call(self, order: Sequence[int], device: str = "0") -> int:
        """Bytes read for one call, whose layers are copied in ``order``."""
        before = self.disk.num_read
        self.begin(order, device)
        for index in order:
            self.passed(index, device)
        return self.disk.num_read - before

    def begin(self, order: Sequence[int], device: str = "0") -> None:
        self.read_ahead.begin(device, [self._store.layers[index] for index in order])
        self.settle()

    def passed(self, index: int, device: str = "0") -> None:
        for stretch in self.read_ahead._stretches[index]:
            self.disk.read_whole(stretch)  # what nobody has read ahead, the copy itself reads
        self.read_ahead.passed(device, self._store.layers[index])
        self.settle()

    def settle(self) -> None:
        for worker in [self.read_ahead.workers[0], *self.read_ahead.workers]:
            done = threading.Event()
            worker.submit(done.set)
            assert done.wait(PATIENCE_S)

    def layers_in_memory(self) -> list[float]:
        """The share of each layer that is in memory."""
        return [
            sum(stretch.num_bytes for stretch in layer if stretch in self.disk.memory) / LAYER_BYTES
            for layer in self.read_ahead._stretches
        ]


@pytest.fixture
def runs(store: ParameterStore) -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.read_ahead.stop()
        for worker in run.read_ahead.workers:
            worker.join()


def start(runs: list[Run], store: ParameterStore, available: float) -> Run:
    runs.append(Run(store, Disk(available)))
    return runs[-1]


STEP = [*EVERYTHING, *EVERYTHING[-2::-1]]  # the last layer's stage is fused


@pytest.mark.parametrize("order", [STEP, EVERYTHING], ids=["training", "evaluation"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_no_more_is_read_than_does_not_fit(
    share: float, order: list[int], store: ParameterStore, runs: list[Run]
) -> None:
    """Each sweep has to read what is not in memory when it begins. The window is the price: what
    is in it when a sweep begins may be of no use. Memory never holds more than it has."""
    run = start(runs, store, available=share * BASE_BYTES)
    room = share * BASE_BYTES * 7 / 8
    window = room / 4 + LAYER_BYTES  # read ahead, and the layer that makes it more than full
    run.call(order)
    for _ in range(3):
        num_read = run.call(order)
        sweeps = len(order) / NUM_LAYERS
        assert num_read <= sweeps * (BASE_BYTES - room + 2 * window)
        if order is EVERYTHING:
            assert num_read <= BASE_BYTES - room + 2 * window  # the kernel would read everything
    assert run.disk.most <= share * BASE_BYTES


def test_the_kept_part_is_spread_over_the_model(store: ParameterStore, runs: list[Run]) -> None:
    """So that the disk reads while devices compute: with whole layers kept it would stand still in
    these, and the devices would wait in the others."""
    run = start(runs, store, available=0.8 * BASE_BYTES)
    for _ in range(2):
        run.call(STEP)
    kept = [layer for layer, share in enumerate(run.layers_in_memory()) if share > 0.5]
    assert all(after - before <= 3 for before, after in pairwise(kept))
    assert kept[0] <= 2
    assert kept[-1] >= NUM_LAYERS - 4


def test_a_base_that_fits_is_read_once_and_costs_nothing_afterwards(
    store: ParameterStore, runs: list[Run]
) -> None:
    run = start(runs, store, available=BASE_BYTES * 8 / 7 + 8)
    assert run.call(STEP) == BASE_BYTES
    assert run.call(STEP) == 0
    assert not run.disk.let_go_of
    assert run.read_ahead._is_resting


def test_memory_may_come_and_go(store: ParameterStore, runs: list[Run]) -> None:
    """Others take memory, and give it back."""
    run = start(runs, store, available=2 * BASE_BYTES)
    run.call(STEP)
    run.disk.available = BASE_BYTES // 2
    for _ in range(2):
        run.call(STEP)
    assert sum(run.layers_in_memory()) * LAYER_BYTES <= BASE_BYTES / 2
    run.disk.available = 2 * BASE_BYTES
    run.call(STEP)
    assert run.call(STEP) == 0


def test_what_comes_next_is_read_before_it_is_needed(
    store: ParameterStore, runs: list[Run]
) -> None:
    run = start(runs, store, available=BASE_BYTES)
    run.begin(STEP)
    for index in EVERYTHING[:-1]:
        num_read = run.disk.num_read
        run.disk.read_whole(run.read_ahead._stretches[index + 1][0])
        assert run.disk.num_read == num_read
        run.passed(index)


def test_at_the_end_of_a_call_the_next_one_is_begun(store: ParameterStore, runs: list[Run]) -> None:
    """While the optimizer works. A forward is followed by its backward, if it was the last time."""
    run = start(runs, store, available=BASE_BYTES / 2)
    run.call(STEP)
    assert all(stretch in run.disk.memory for stretch in run.read_ahead._stretches[0])
    forward, backward = EVERYTHING, EVERYTHING[::-1]
    run.call(forward)
    run.call(backward)
    run.call(forward)
    assert all(stretch in run.disk.memory for stretch in run.read_ahead._stretches[-1])


def test_layers_that_stay_on_the_device_are_not_read(
    store: ParameterStore, runs: list[Run]
) -> None:
    """Only what trains of them goes up, which tells nothing about the order."""
    run = start(runs, store, available=BASE_BYTES / 3)
    others = [layer for layer in STEP if layer not in (3, 4)]
    for _ in range(3):
        run.call(others)
        run.passed(3)
    assert run.layers_in_memory()[4] == 0


def test_several_devices_share_memory(store: ParameterStore, runs: list[Run]) -> None:
    """Each has every second layer; what is in one's window stays, whoever has passed it."""
    available = 0.6 * BASE_BYTES
    run = start(runs, store, available=available)
    for _ in range(3):
        orders = {device: STEP[number::2] for number, device in enumerate("01")}
        for device, order in orders.items():
            run.begin(order, device)
        before = run.disk.num_read
        for position, index in enumerate(STEP):
            run.passed(index, "01"[position % 2])
    room = available * 7 / 8
    assert run.disk.num_read - before <= 2 * (BASE_BYTES - room + 2 * (room / 4 + LAYER_BYTES))
    assert run.disk.most <= available


def test_a_call_that_failed_leaves_no_window(store: ParameterStore, runs: list[Run]) -> None:
    run = start(runs, store, available=BASE_BYTES / 3)
    run.begin(STEP)
    run.passed(0)
    run.read_ahead.drop("0")
    run.settle()
    assert set(run.disk.memory) <= set(run.read_ahead._kept)
    run.call(STEP)
    assert run.disk.most <= BASE_BYTES / 3


def test_engines_share_memory(store: ParameterStore, runs: list[Run]) -> None:
    first = start(runs, store, available=1.5 * BASE_BYTES)
    first.call(STEP)
    assert not first.disk.let_go_of
    second = start(runs, store, available=1.5 * BASE_BYTES)
    second.call(STEP)
    first.call(STEP)
    first.call(STEP)
    assert first.disk.let_go_of
    second.read_ahead.stop()
    for worker in second.read_ahead.workers:
        worker.join()
    first.call(STEP)
    assert first.call(STEP) == 0


def test_what_is_visited_most_is_kept_first() -> None:
    layers = [
        [Stretch(100 * index, 10, ""), Stretch(100 * index + 50, 1, "")] for index in range(6)
    ]
    visits = {
        stretch: 1 + (2 <= index < 4) for index, layer in enumerate(layers) for stretch in layer
    }
    assert kept_of(layers, visits, 22) == {*layers[2], *layers[3]}
    assert kept_of(layers, visits, 0) == kept_of(layers, visits, -1) == frozenset()
    assert kept_of(layers, visits, 66) == {stretch for layer in layers for stretch in layer}
    for room in range(70):
        assert sum(stretch.num_bytes for stretch in kept_of(layers, visits, room)) <= room
    unused = {**visits, layers[2][0]: 0}
    assert layers[2][0] not in kept_of(layers, unused, 66)


# Whole engines.


class Adapted(nn.Module):
    """A frozen linear layer with something that trains beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) * self.scale


def adapted(path: Path | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted() for _ in range(NUM_LAYERS)))
    for layer in model:
        layer.base.requires_grad_(False)
        if path is not None:
            mapped(layer.base, path.with_stem(f"{path.stem}-{len(list(path.parent.iterdir()))}"))
    return model


def losses(
    engines: Engines, model: nn.Sequential, devices: DeviceSet, *, is_async: bool, pin_model: str
) -> list[Tensor]:
    engine = engines(model, devices, pin_model=pin_model)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=0.1)
    stages = [range(index, index + 1) for index in range(NUM_LAYERS)]
    config = RoundPipeRunConfig(
        num_microbatch=2,
        execute_plan=ModelExecutePlan(fwd_plan=stages[:-1], bwd_plan=stages[::-1]),
    )
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(4):
        found.append(
            engine.forward_backward(
                (inputs,), loss_fn=lambda outputs, _: outputs.square().mean() / 2, run_config=config
            )
        )
        engine.step(optimizer.step, is_async=is_async)
    engine.synchronize()
    return found


@pytest.mark.parametrize("pin_model", ["off", "alloc"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_numbers_are_those_of_weights_in_memory(
    devices: DeviceSet,
    is_async: bool,
    pin_model: str,
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system really drops pages and reads them again, in the midst of steps."""
    expected = losses(engines, plain := adapted(), devices, is_async=is_async, pin_model="alloc")
    made = note_read_aheads(monkeypatch, room=BASE_BYTES // 2)
    model = adapted(tmp_path / "shard.safetensors")
    actual = losses(engines, model, devices, is_async=is_async, pin_model=pin_model)
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    devices.check(weights_of(model), weights_of(plain))
    (read_ahead,) = made
    assert 0 < len(read_ahead._kept) < len(model) * 2
    assert f"{read_ahead.num_bytes / 2**20:.1f} MiB mapped" in repr(read_ahead)


def test_weights_in_memory_need_no_threads(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = note_read_aheads(monkeypatch, room=0)
    losses(engines, adapted(), ONE, is_async=False, pin_model="off")
    assert made == [None]


def test_a_forgotten_engine_ends_its_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    engine = RoundPipe(adapted(tmp_path / "shard.safetensors"), devices=ONE.argument)
    engine.forward_backward((torch.ones(2, WIDTH),), loss_fn=lambda outputs, _: outputs.sum())
    started = set(threading.enumerate()) - before
    assert sum("pages" in thread.name for thread in started) == 1 + read_ahead_module.NUM_READERS
    del engine
    gc.collect()
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name


def test_a_file_cut_before_training_is_refused(engines: Engines, tmp_path: Path) -> None:
    """Reading it would end the process with SIGBUS."""
    model = adapted(tmp_path / "shard.safetensors")
    file = next(iter(tmp_path.iterdir()))
    os.truncate(file, 100)
    with pytest.raises(ConfigError, match=f"{file.name} has 100 bytes"):
        engines(model, ONE, pin_model="off")


@pytest.mark.parametrize("pin_model", ["off", "alloc"])
def test_a_file_that_can_not_be_read_any_more_fails_the_call(
    pin_model: str, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the process, if it was found while reading ahead."""
    made = note_read_aheads(monkeypatch, room=BASE_BYTES // 2)
    model = adapted(tmp_path / "shard.safetensors")
    engine = engines(model, ONE, pin_model=pin_model)
    made[0]._damaged = "shard"
    with pytest.raises(ConfigError, match="shard was cut"):
        engine.forward_backward((torch.ones(2, WIDTH),), loss_fn=lambda outputs, _: outputs.sum())


def test_a_reader_that_finds_nothing_says_which_file(
    store: ParameterStore, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "read", lambda *_: False)
    run = start(runs, store, available=BASE_BYTES / 2)
    run.read_ahead.check()
    run.begin(STEP)
    with pytest.raises(ConfigError, match=r"model\.safetensors was cut"):
        run.read_ahead.check()


def note_read_aheads(monkeypatch: pytest.MonkeyPatch, *, room: int) -> list[ReadAhead]:
    made: list[ReadAhead] = []
    make = state.make_read_ahead
    monkeypatch.setattr(PageCache, "room", lambda _: room)
    monkeypatch.setattr(
        state, "make_read_ahead", lambda *args: made.append(make(*args)) or made[-1]
    )
    return made


def test_large_weights_are_read_in_chunks_by_several_threads(
    store: ParameterStore, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead_module, "CHUNK_BYTES", 1000)
    chunks: list[tuple[int, int]] = []
    threads: set[str] = set()

    def read(self: Disk, start: int, num_bytes: int) -> bool:
        chunks.append((start, num_bytes))
        threads.add(threading.current_thread().name)
        return True

    monkeypatch.setattr(Disk, "read", read)
    run = start(runs, store, available=BASE_BYTES / 2)
    run.begin(STEP)
    run.settle()
    for stretch in run.read_ahead._window:
        parts = sorted(
            chunk for chunk in chunks if 0 <= chunk[0] - stretch.start < stretch.num_bytes
        )
        assert [first for first, _ in parts] == [
            stretch.start + offset for offset in range(0, stretch.num_bytes, 1000)
        ]
        assert sum(size for _, size in parts) == stretch.num_bytes
    assert len(threads) == read_ahead_module.NUM_READERS
