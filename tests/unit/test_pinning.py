"""Page-locking in place, as CUDA is told of it: whole pages, each once, unlocked before others can have them."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from roundpipe.memory import pinning
from roundpipe.memory.pinning import HostMemory

PAGE = pinning._PAGE
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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    runtime = SimpleNamespace(cudaHostRegister=cuda.lock, cudaHostUnregister=cuda.unlock)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinning, "_take_back_error", cuda.take_back_error)
    monkeypatch.setattr(pinning, "_refused", False)
    return cuda


def test_pages_that_tensors_share_are_locked_once(cuda: Cuda) -> None:
    memory = HostMemory("register", accelerated=True)
    block = torch.empty(8 * PAGE, dtype=torch.uint8)
    first = -block.data_ptr() % PAGE  # where a page begins
    memory.lock_in_place([block[first + 10 : first + 20], block[first + 5 : first + PAGE + 1], block[:0]])
    assert cuda.locked == {block.data_ptr() + first: 2 * PAGE}
    memory.close()
    assert not cuda.locked


def test_an_engine_that_is_never_closed_unlocks_too_and_before_the_memory_is_freed(cuda: Cuda) -> None:
    """CUDA takes an address that is locked for the pages that were there, whoever has it now."""
    memory = HostMemory("register", accelerated=True)
    block = torch.empty(PAGE, dtype=torch.uint8)
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
        memory.lock_in_place([torch.empty(PAGE, dtype=torch.uint8)])
    assert cuda.num_asked == 2
    memory.close()
    assert not caplog.records
    assert not cuda.errors_left


def test_a_refusal_is_said_once_and_is_the_last_thing_asked(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    cuda.answer = REFUSED
    memory = HostMemory("register", accelerated=True)
    for _ in range(2):
        memory.lock_in_place([torch.empty(PAGE, dtype=torch.uint8)])
    assert cuda.num_asked == 1
    assert len(caplog.records) == 1
    assert "refused to page-lock" in caplog.text
    assert not cuda.errors_left
