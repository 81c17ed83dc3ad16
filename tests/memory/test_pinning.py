"""Page-locking in place, as CUDA is told of it: pages of a weight alone, unlocked before others can
have them."""

import gc
import random
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from roundpipe.memory import pinning
from roundpipe.memory.pinning import HostMemory

PAGE = pinning._PAGE
ENOUGH = (
    pinning._LEAST_BYTES + PAGE
)  # bytes of a tensor that has pages of its own wherever it begins
LOCKED_ALREADY, REFUSED = 712, 801


class Cuda:
    """What has been asked of CUDA, and how it answers."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.answer = 0
        self.num_asked = 0
        self.errors_left = 0

    def lock(self, address: int, num_bytes: int, flags: int) -> int:
        self.num_asked += 1
        if self.answer == 0:
            self.locked[address] = num_bytes
        else:
            self.errors_left += 1
        return self.answer

    def unlock(self, address: int) -> int:
        del self.locked[address]
        return 0

    def take_back_error(self) -> None:
        self.errors_left -= 1

    def is_locked(self, address: int) -> bool:
        return any(start <= address < start + num_bytes for start, num_bytes in self.locked.items())

    def copies(self, source: torch.Tensor) -> bool:
        """Whether it would copy this from the host: not what begins in locked pages and ends
        outside of them."""
        start, end = source.data_ptr(), source.data_ptr() + source.nbytes
        holders = [
            first + num_bytes
            for first, num_bytes in self.locked.items()
            if first <= start < first + num_bytes
        ]
        return not holders or end <= holders[0]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    runtime = SimpleNamespace(cudaHostRegister=cuda.lock, cudaHostUnregister=cuda.unlock)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinning, "_take_back_error", cuda.take_back_error)
    monkeypatch.setattr(pinning, "_refused", False)
    return cuda


@pytest.mark.parametrize("seed", range(20))
def test_weights_and_what_lies_between_them_can_still_be_copied(cuda: Cuda, seed: int) -> None:
    """Wherever they begin and end: locked edges would be locked for a neighbour too."""
    draws = random.Random(seed)
    block = torch.randint(0, 256, (8 * ENOUGH,), dtype=torch.uint8)
    cuts = sorted(draws.sample(range(0, block.nbytes, 2), 9))
    if seed % 2:
        cuts = sorted({cut // PAGE * PAGE for cut in cuts})  # as mapped files may have them
    tensors = [block[start:stop].view(torch.int16) for start, stop in pairwise(cuts)]
    weights = tensors[::2] if seed % 3 else tensors
    memory = HostMemory("register", accelerated=True)
    memory.lock_in_place(weights)
    assert all(map(cuda.copies, [*tensors, block]))
    for weight in weights:
        target = torch.zeros_like(weight)
        for there, here in memory.copies(target, weight):
            assert cuda.copies(here)
            assert {
                cuda.is_locked(here.data_ptr() + byte) for byte in range(0, here.nbytes, PAGE // 2)
            } <= ({cuda.is_locked(here.data_ptr())})
            there.copy_(here)
        assert torch.equal(target, weight)
        locked = sum(cuda.is_locked(weight.data_ptr() + byte) for byte in range(weight.nbytes))
        assert locked >= weight.nbytes - 2 * PAGE or weight.nbytes < ENOUGH
    memory.close()
    assert not cuda.locked


@pytest.mark.parametrize("mode", ["alloc", "off"])
def test_what_is_not_locked_in_place_is_copied_at_once(cuda: Cuda, mode: pinning.PinMode) -> None:
    memory = HostMemory(mode, accelerated=True)
    weight = torch.ones(ENOUGH)
    memory.lock_in_place([weight])
    assert not cuda.locked
    assert [here.data_ptr() for _, here in memory.copies(torch.zeros_like(weight), weight)] == [
        weight.data_ptr()
    ]


def test_weights_that_do_not_lie_in_one_piece_are_not_locked(cuda: Cuda) -> None:
    memory = HostMemory("register", accelerated=True)
    weight = torch.rand(512, 512).t()
    memory.lock_in_place([weight, torch.empty(0)])
    assert not cuda.locked
    target = torch.zeros(512, 512)
    for there, here in memory.copies(target, weight):
        there.copy_(here)
    assert torch.equal(target, weight)


def test_an_engine_that_is_never_closed_unlocks_too_and_before_the_memory_is_freed(
    cuda: Cuda,
) -> None:
    """CUDA takes an address that is locked for the pages that were there, whoever has it now."""
    memory = HostMemory("register", accelerated=True)
    block = torch.empty(ENOUGH, dtype=torch.uint8)
    memory.lock_in_place([block.view(-1)])
    storage = weakref.ref(block.untyped_storage())
    del block
    gc.collect()
    assert cuda.locked
    del memory
    gc.collect()
    assert not cuda.locked
    assert storage() is None


def test_pages_locked_by_somebody_else_stay_his_and_are_no_refusal(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.answer = LOCKED_ALREADY
    memory = HostMemory("register", accelerated=True)
    for _ in range(2):
        memory.lock_in_place([torch.empty(ENOUGH, dtype=torch.uint8)])
    assert cuda.num_asked == 2
    memory.close()
    assert not caplog.records
    assert not cuda.errors_left


def test_a_refusal_is_said_once_and_is_the_last_thing_asked(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.answer = REFUSED
    memory = HostMemory("register", accelerated=True)
    for _ in range(2):
        memory.lock_in_place([torch.empty(ENOUGH, dtype=torch.uint8)])
    assert cuda.num_asked == 1
    assert len(caplog.records) == 1
    assert "refused to page-lock" in caplog.text
    assert not cuda.errors_left


@pytest.mark.parametrize("num_bytes", [1, PAGE, 3 << 20, (5 << 20) + 24])
@pytest.mark.parametrize("kind", ["arena", "buffer", "staging"])
def test_new_memory_is_locked_as_a_whole_until_nobody_holds_it(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, kind: str, num_bytes: int
) -> None:
    """Its pages are made before, by several threads: locking would make them one by one."""
    monkeypatch.setattr(pinning, "_PIECE", 1 << 20)
    monkeypatch.setattr(pinning, "usable_cores", lambda: 3)
    arena = getattr(HostMemory("alloc", accelerated=True), kind)(num_bytes)
    assert cuda.locked == {arena.bytes.data_ptr(): num_bytes}
    last = arena.tensor(num_bytes - 1, (1,), torch.uint8)
    assert last.untyped_storage().nbytes() == 1
    arena.bytes.copy_(torch.arange(num_bytes) % 251)
    assert last.item() == (num_bytes - 1) % 251
    del arena
    assert cuda.is_locked(last.data_ptr()), "somebody holds it"
    del last
    assert not cuda.locked


def test_what_the_system_refuses_to_lock_is_memory_all_the_same(cuda: Cuda) -> None:
    cuda.answer = REFUSED
    memory = HostMemory("alloc", accelerated=True)
    for _ in range(2):
        memory.buffer(3 << 20).bytes.fill_(1)
    assert (cuda.num_asked, cuda.locked) == (1, {})
