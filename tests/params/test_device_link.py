"""Ranks that send through their devices train as those that do not.

Here the devices are virtual ones and talk by gloo, in parts that fit nothing evenly.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import roundpipe
from roundpipe.params import device_link, rank_messages, rank_talk
from tests.params.test_rank_sums import trains_as_one
from tests.support.models import make_mlp
from tests.support.processes import check_in_processes, run_in_processes


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes(count: int, tmp_path: Path) -> None:
    check_in_processes(all_checks, tmp_path, count)


def test_one_that_is_killed_while_devices_send_is_named(tmp_path: Path) -> None:
    ended = run_in_processes(one_is_killed, tmp_path)
    assert [code for code, _ in ended] == [1, -signal.SIGKILL], "\n".join(t for _, t in ended)
    assert "RankError: lost one of ranks 1 while devices sent" in ended[0][1]


def one_is_killed() -> None:
    """It has said over gloo that it is there, and then has begun to talk."""
    dist.init_process_group("gloo")
    link_virtual_devices()
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    if engine.ranks.rank == 1:
        dying: Any = LikeNCCL
        dying._start_coalescing = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    there = torch.ones(1000)
    engine.ranks.exchange({engine.ranks.others[0]: there}, {})


def all_checks() -> None:
    dist.init_process_group("gloo")
    sent = link_virtual_devices()
    trains_as_one(lambda call, calls: call == calls - 1, is_async=True)
    assert max(sent) > device_link._BUFFER_BYTES, "nothing took several parts"
    sends_what_each_pair_has()


def link_virtual_devices() -> list[int]:
    """Returns where the bytes of what was sent at once are noted."""
    sent: list[int] = []

    class Noting(device_link.DeviceLink):
        def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
            sent.extend(tensor.nbytes for tensor in outgoing.values())
            super().swap(outgoing, incoming)

    changes: dict[tuple[Any, str], Any] = {
        (rank_talk, "has_nccl"): lambda group: True,
        (rank_talk, "can_link"): lambda group, device: True,
        (rank_talk, "DeviceLink"): Noting,
        (rank_talk, "LEAST_BY_DEVICE"): 100,
        (rank_talk, "own_nccl"): lambda *given: LikeNCCL(rank_messages.own_gloo(*given)),
        (device_link, "_BUFFER_BYTES"): 1000,
    }
    for (owner, name), value in changes.items():
        setattr(owner, name, value)
    return sent


class LikeNCCL:
    """What is said between begin and end goes at once, and ends as one. gloo carries it."""

    supports_coalescing = True

    def __init__(self, gloo: Any) -> None:
        self.allreduce, self.shutdown, self.abort = gloo.allreduce, gloo.shutdown, gloo.abort
        self._gloo, self._works = gloo, list[Any]()

    def _start_coalescing(self) -> None:
        assert not self._works, "the talk before this one has not ended"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._works.append(self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self._works.append(self._gloo.recv(tensors, peer, tag))

    def _end_coalescing(self) -> "LikeNCCL":
        return self

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()


def sends_what_each_pair_has() -> None:
    """Other sizes, in one direction only, and none at all."""
    with roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD) as engine:
        rank = engine.ranks.rank

        def made(source: int, target: int) -> Tensor:
            size = {(0, 1): 1001, (1, 0): 3, (1, 2): 400, (2, 0): 26}.get((source, target), 0)
            return torch.arange(size, dtype=torch.float64) + 10 * source + target

        expected = {peer: made(peer, rank) for peer in engine.ranks.others}
        incoming = {peer: torch.full_like(one, -1) for peer, one in expected.items()}
        engine.ranks.exchange({peer: made(rank, peer) for peer in engine.ranks.others}, incoming)
        torch.testing.assert_close(incoming, expected, atol=0, rtol=0)
