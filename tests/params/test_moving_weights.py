"""Weights that move into arenas of their own leave nothing behind."""

import gc

import torch
from torch import nn

from roundpipe.memory.pinning import HostArena, HostMemory
from roundpipe.memory.slot_sizes import ALIGNMENT
from roundpipe.params.working import ParameterStore
from roundpipe.system.host_memory import resident_bytes

LAYERS, PARTS, ELEMENTS = 16, 128, 8192  # of 32 KB, which malloc takes from its heap


class Parts(nn.Module):
    """Frozen weights in many small pieces, as scales of quantized ones are."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(PARTS):
            weight = nn.Parameter(torch.ones(ELEMENTS), requires_grad=False)
            self.register_parameter(f"part{index}", weight)


def test_memory_of_small_weights_is_the_systems_again() -> None:
    """Malloc kept it: a model of many small weights was in memory twice."""
    layers, size = [Parts() for _ in range(LAYERS)], LAYERS * PARTS * ELEMENTS * 4
    above = [torch.ones(1024) for _ in range(64)]  # so that what is freed is not malloc's last
    memory = HostMemory("alloc", accelerated=False)
    memory.rehomes = True  # as where there is a GPU
    gc.collect()
    before = resident_bytes()
    store = ParameterStore(layers, memory)
    assert resident_bytes() - before < size / 2
    assert all(torch.equal(one, torch.ones_like(one)) for one in (*store.parameters, *above))


def test_tied_weights_have_room_once() -> None:
    """The layer that has it second had all of an image, in locked pages that nothing used."""
    first, middle = nn.Embedding(512, 64), nn.Linear(64, 64)
    last = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 512, bias=False))
    last[1].weight = first.weight
    first.weight.requires_grad_(False)
    values = [one.detach().clone() for layer in (first, middle, last) for one in layer.parameters()]
    memory = HostMemory("alloc", accelerated=False)
    memory.rehomes = True  # as where there is a GPU
    plain, taken = memory.arena, list[int]()

    def arena(num_bytes: int) -> HostArena:
        taken.append(num_bytes)
        return plain(num_bytes)

    memory.arena = arena  # type: ignore[method-assign]
    store = ParameterStore([first, middle, last], memory)
    weights = [one.nbytes for one in store.parameters]
    assert sum(weights) <= sum(taken) < sum(weights) + ALIGNMENT * len(weights)
    assert last[1].weight is first.weight
    moved = [one for layer in (first, middle, last) for one in layer.parameters()]
    assert all(map(torch.equal, moved, values))
    images = [store.image_of(layer) is not None for layer in store.layers]
    assert images == [True, True, False]
