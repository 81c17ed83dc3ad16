"""Memory that the system does not page-lock: everything goes on, and nobody else is told of an
error."""

import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from roundpipe.memory import pinning
from roundpipe.memory.pinning import HostArena
from tests.support.device_sets import ACCELERATORS
from tests.support.engines import Engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
NOBODYS_ADDRESS = 1 << 12


@pytest.fixture(autouse=True)
def not_refused() -> Iterator[None]:
    before, pinning._refused = pinning._refused, False
    yield
    pinning._refused = before


def kernel_works() -> bool:
    return torch.ones(2, device="cuda").sum().item() == 2


def test_a_refusal_is_not_the_error_of_the_next_kernel() -> None:
    assert not pinning._lock_pages(NOBODYS_ADDRESS, 4096)
    assert pinning._refused
    assert kernel_works()


def test_nor_on_a_thread_of_its_own() -> None:
    """CUDA keeps an error for each thread."""
    found = []

    def refused() -> None:
        pinning._lock_pages(NOBODYS_ADDRESS, 4096)
        found.append(kernel_works())

    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()
    assert found == [True]


def test_pages_that_are_locked_already_are_no_refusal() -> None:
    arena = HostArena(1 << 20, lock=True)
    assert not pinning._lock_pages(arena.bytes.data_ptr(), arena.num_bytes)
    assert not pinning._refused
    assert arena.bytes.is_pinned()
    assert kernel_works()
    assert HostArena(1 << 20, lock=True).bytes.is_pinned()


def is_locked(weight: torch.Tensor) -> bool:
    """In its midst."""
    middle = (ctypes.c_byte * 1).from_address(weight.data_ptr() + weight.nbytes // 2)
    return torch.frombuffer(middle, dtype=torch.uint8).is_pinned()


def test_two_engines_may_lock_one_models_pages(engines: Engines) -> None:
    """The second finds them locked, computes with them, and leaves them to the first."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    weights = [layer.weight for layer in model]
    inputs = torch.randn(8, 256)
    with torch.no_grad():
        expected = model(inputs)
        first = engines(model, ACCELERATORS[0], pin_model="register")
        second = engines(model, ACCELERATORS[0], pin_model="register")
        ACCELERATORS[0].check(second(inputs), expected)
        second.close()
        assert all(map(is_locked, weights))
        ACCELERATORS[0].check(first(inputs), expected)
        first.close()
        assert not any(map(is_locked, weights))
    assert not pinning._refused


def test_neighbours_of_weights_that_are_locked_in_place_can_still_be_copied(
    engines: Engines,
) -> None:
    """CUDA refuses what begins in locked pages and ends outside, as a batch beside a weight may."""
    width, margin = 256, 3000
    memory = torch.randn(3 * (width * width + margin)) / width**0.5  # outputs of size one
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2)))
    starts = [margin, 2 * margin + width * width]
    for layer, start in zip(model, starts, strict=True):
        layer.weight.data = memory[start : start + width * width].view(width, width)
    inputs = torch.randn(8, width)
    with torch.no_grad():
        expected = model(inputs)
    engine = engines(model, ACCELERATORS[0], pin_model="register")
    assert all(is_locked(layer.weight) for layer in model)
    with torch.no_grad():
        ACCELERATORS[0].check(engine(inputs), expected)
    ends = [start + width * width for start in starts]
    between = [memory[: starts[0]], memory[ends[0] : starts[1]], memory[ends[1] :]]
    for tensor in (memory, *between, *(layer.weight.detach() for layer in model)):
        assert torch.equal(tensor.cuda(non_blocking=True).cpu(), tensor)


def test_an_engine_without_page_locked_memory_trains_as_one_with(engines: Engines) -> None:
    def train(refused: bool) -> list[float]:
        pinning._refused = refused
        torch.manual_seed(0)
        engine = engines(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), ACCELERATORS[0])
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = engine.forward_backward(
                (torch.ones(8, 64),), loss_fn=lambda outputs, _: outputs.square().mean()
            )
            engine.step(optimizer.step)
            losses.append(loss.item())
        return losses

    assert train(refused=True) == train(refused=False)
