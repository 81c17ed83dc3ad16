"""Host blocks: used again by size, and given back by whoever drops one last, at whatever moment
that is."""

import random
from collections import deque

import pytest

from roundpipe.memory.blocks import HostBlocks
from roundpipe.memory.pinning import HostMemory


def make_blocks() -> HostBlocks:
    return HostBlocks(HostMemory("alloc", accelerated=False))


def test_a_block_that_nobody_holds_is_used_again() -> None:
    blocks = make_blocks()
    for _ in range(3):
        blocks.take(5000)
    assert blocks.num_bytes == 2 * 4096
    assert "1 free" in repr(blocks)


def test_a_collection_may_give_one_back_while_another_is_taken() -> None:
    """Collections run at any allocation, so the one that finds a block may run inside the lock of
    its own thread."""
    blocks = make_blocks()
    dropped = blocks.take(1)
    with blocks._lock:
        del dropped
    blocks.take(1)
    assert blocks.num_bytes == 4096


def test_what_a_first_plan_needed_is_given_back() -> None:
    blocks = make_blocks()
    blocks.expect(8 * 4096, is_sure=False)
    held = [blocks.take(4096) for _ in range(8)]
    blocks.expect(2 * 4096, is_sure=True)
    assert blocks.num_bytes == 8 * 4096, "they are in use"
    held.clear()
    blocks.expect(2 * 4096, is_sure=True)
    assert blocks.num_bytes == 2 * 4096


def test_what_calls_before_needed_stays_for_a_few() -> None:
    blocks = make_blocks()
    blocks._wanted = deque(maxlen=4)
    wanted = [8, 2, 3, 2, 2, 2]
    sizes = []
    for count in wanted:
        blocks.expect(count * 4096, is_sure=True)
        for block in [blocks.take(4096) for _ in range(count)]:
            del block
        sizes.append(blocks.num_bytes // 4096)
    assert sizes == [8, 8, 8, 8, 8, 3]


def test_what_is_in_use_counts_beside_what_is_expected() -> None:
    """So do the parts of a model, which keep their inputs at once."""
    blocks = make_blocks()
    first, second = blocks.take(4096), blocks.take(3 * 4096)
    del second
    blocks.expect(3 * 4096, is_sure=True)
    assert blocks.num_bytes == 4 * 4096
    del first


def test_batches_of_many_lengths_take_no_more_than_the_longest() -> None:
    blocks = make_blocks()
    for pages in (5, 9, 3, 8, 1, 7, 2, 6, 4):
        blocks.expect(4 * 4096 * pages, is_sure=True)
        held = [blocks.take(4096 * pages) for _ in range(4)]
        held.clear()
    assert blocks.num_bytes <= 1.25 * 4 * 4096 * 9


def test_memory_is_let_go_only_when_its_lane_is_done() -> None:
    waited = list[int]()

    class Noted:
        def wait(self) -> None:
            waited.append(blocks.num_bytes)

    blocks = make_blocks()
    held = blocks.take(4096)
    held.free = Noted()
    del held
    blocks.expect(0, is_sure=True)
    assert waited == [0]


def made_by(blocks: HostBlocks, pages: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many blocks each of some calls makes, which take 24 of so many pages."""
    made, buffer = list[int](), blocks._memory.buffer
    monkeypatch.setattr(blocks._memory, "buffer", lambda size: made.append(size) or buffer(size))
    counts = []
    for own in pages:
        made.clear()
        blocks.expect(24 * 4096 * own, is_sure=True)
        held = [blocks.take(4096 * own) for _ in range(24)]
        held.clear()
        blocks.shrink()
        counts.append(len(made))
    return counts


def test_random_lengths_make_blocks_at_first_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """To page-lock memory takes longer than the copy that it is for."""
    lengths = random.Random(0)
    counts = made_by(make_blocks(), [lengths.randint(8, 64) for _ in range(200)], monkeypatch)
    assert sum(counts[40:]) < 0.02 * 24 * 160


@pytest.mark.parametrize("lengths", [(64, 16, 4), (64, 40, 24, 12), (64, *(8,) * 9)], ids=str)
def test_lengths_that_come_again_and_again_make_blocks_once(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = made_by(make_blocks(), [*lengths] * 10, monkeypatch)
    assert not any(counts[2 * len(lengths) :])


def test_what_several_forwards_keep_at_once_stays_from_step_to_step() -> None:
    blocks = make_blocks()
    for _ in range(3):
        held = []
        for _ in range(2):
            blocks.expect(4 * 4096, is_sure=True)
            held += [blocks.take(4096) for _ in range(4)]
        held.clear()
        blocks.shrink()
        assert blocks.num_bytes == 8 * 4096
