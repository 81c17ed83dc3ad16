"""State on a disk is read ahead of the optimizer and written behind it, so that little of it is in
memory at a time; and what cannot be written is told.

The judge of what is in memory is the kernel (mincore).
"""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roundpipe.memory.state_file import Span, StateFile
from roundpipe.step import state_pages
from roundpipe.step.state_pages import StatePages
from tests.support.mapped import cached_bytes
from tests.support.optimizers import PATIENCE_S

COUNT, NUM = 1 << 20, 12  # masters of 4 MiB
BYTES = 4 * COUNT
AHEAD = BEHIND = 4 * BYTES
LATE = state_pages.NUM_READERS * BYTES


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatePages]:
    """With little ahead, little behind, one master in each call, and room for nothing else."""
    monkeypatch.setattr(state_pages, "AHEAD_BYTES", AHEAD)
    monkeypatch.setattr(state_pages, "BEHIND_BYTES", BEHIND)
    monkeypatch.setattr(state_pages, "TOGETHER_BYTES", 2 * BYTES)
    monkeypatch.setattr(state_pages, "free_host_bytes", lambda: 0)
    made = StatePages(StateFile(tmp_path))
    yield made
    made.writer.stop()
    made.writer.join()


def read_ahead_bytes() -> int:
    """Returns what the system may read of a file beyond what it is asked for, on any disk."""
    found = Path("/sys/class/bdi").glob("*/read_ahead_kb")
    return max((int(each.read_text()) for each in found), default=0) << 10


def settle(pages: StatePages) -> None:
    """Returns when the writer has nothing left to do."""
    done = threading.Event()
    pages.writer.submit(done.set)
    assert done.wait(PATIENCE_S)


def let_go(pages: StatePages, state: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor in (tensor for pair in state for tensor in pair):
        span = pages.file.span_of(tensor)
        assert span is not None
        pages.file.let_go(span)


def make_state(pages: StatePages) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Masters with a moment each, none of which is in memory."""
    masters, moments = (
        [pages.file.empty((COUNT,), torch.float32) for _ in range(NUM)] for _ in range(2)
    )
    state = list(zip(masters, moments, strict=True))
    for number, (master, moment) in enumerate(state):
        master.fill_(number)
        moment.fill_(-number)
    let_go(pages, state)
    if any(cached_bytes(tensor) for pair in state for tensor in pair):
        pytest.skip("the temporary folder lies in memory")
    return state


def in_memory(state: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(cached_bytes(tensor) for pair in state for tensor in pair)


def test_little_is_in_memory_and_nothing_is_lost(pages: StatePages) -> None:
    state = make_state(pages)
    # Masters lie behind each other in the file, and so do moments.
    beyond = 2 * read_ahead_bytes()
    # Those passed now, one more than waits behind, and what late readers have brought back.
    most = AHEAD + BEHIND + 2 * 2 * BYTES + LATE + beyond
    for turn in range(2):
        pages.begin(state, for_writing=True)
        for some in pages.in_calls(state):
            for master, moment in some:
                assert cached_bytes(master) == cached_bytes(moment) == BYTES
                assert in_memory(state) <= most
                master.add_(1)
                moment.sub_(1)
        pages.end()
        settle(pages)
        assert in_memory(state) <= LATE + beyond
        for number, (master, moment) in enumerate(state):
            assert bool((master == number + turn + 1).all())
            assert torch.equal(moment, -master)
        let_go(pages, state)


def test_what_has_room_stays_and_is_spread_evenly(
    pages: StatePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that read a half and then nothing would have the disk stand still half of the time."""
    state = make_state(pages)
    half = int(NUM * 2 * BYTES / 2 / state_pages.KEPT_OF_FREE)
    monkeypatch.setattr(state_pages, "free_host_bytes", lambda: half)
    pages.begin(state, for_writing=True)
    for _ in pages.in_calls(state):
        pass
    pages.end()
    settle(pages)
    assert [bool(cached_bytes(master)) for master, _ in state] == [False, True] * (NUM // 2)


def test_state_that_is_only_read_is_not_written(
    pages: StatePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters that are copied to working copies, for example."""
    state = make_state(pages)
    asked: list[bool] = []
    read = pages.file.read

    def noted(span: Span, offset: int, num_bytes: int, *, for_writing: bool) -> None:
        asked.append(for_writing)
        read(span, offset, num_bytes, for_writing=for_writing)

    monkeypatch.setattr(pages.file, "read", noted)
    pages.begin([(master,) for master, _ in state], for_writing=False)
    for number, (master, _) in enumerate(state):
        pages.reach([master])
        assert float(master[0]) == number
    pages.end()
    settle(pages)
    assert set(asked) == {False}
    assert in_memory(state) <= LATE + 2 * read_ahead_bytes()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "a bad disk"), MemoryError("no room")])
def test_state_that_cannot_be_written_is_told(
    pages: StatePages, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The page in memory may be the only copy, yet the system counts it as written from then on.
    Whatever has failed, nobody goes on waiting for the writer."""
    state = make_state(pages)

    def fail(_: Span) -> None:
        raise error

    monkeypatch.setattr(pages.file, "let_go", fail)
    pages.begin(state, for_writing=True)
    pages.reach([state[0][0]])
    pages.reach([state[1][0]])
    settle(pages)
    with pytest.raises(type(error), match="a bad disk|no room"):
        pages.reach([state[2][0]])
    pages._leave(NUM)  # more than may wait behind
    settle(pages)
