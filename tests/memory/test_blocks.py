"""Host blocks: used again by size, and given back by whoever drops one last, at whatever moment
that is."""

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
