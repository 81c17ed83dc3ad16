"""Large tensors go from rank to rank through their devices, where these have a way to each other
that is faster than the hosts' network.

[Note: device links] It stays host memory for whoever sends and whoever gets it. A part at a time
goes up to this rank's device, from device to device, and down on the other side: on a lane of its
own, so that it waits for nothing that calls have queued, and by a communicator of its own, because
the user may talk in the group's. Whoever sends has heard before that the other one is there, since
a device would wait for one that has ended until the group's timeout.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from ..device import Device
from ..errors import RankError
from ..memory.copier import Pair, PinnedCopier
from ..memory.pinning import HostMemory

_BUFFER_BYTES = 32 << 20  # of what goes at a time, to or from all others together


class DeviceLink:
    """Used by one thread at a time, on all ranks in the same order, which make one at the same
    time.

    Args:
        device: this rank's.
        group: whose backend sends between such devices.
        members: its processes, by the rank.
        rank: this one's.
    """

    def __init__(
        self, device: Device, group: Any, members: Sequence[int], rank: int, memory: HostMemory
    ) -> None:
        self._group = group
        self._members = members
        others = [peer for peer in range(len(members)) if peer != rank]
        self._part_bytes = _BUFFER_BYTES // len(others)
        self._lane = device.new_lane()
        self._copier = PinnedCopier(self._lane, memory, _BUFFER_BYTES)
        with self._lane.work():
            made = torch.zeros(
                2, len(others), self._part_bytes, dtype=torch.uint8, device=device.torch_device
            )
            # Because two alone cannot begin a communicator.
            dist.all_reduce(made[0, 0, :1], group=group)
        self._lane.record().wait()
        self._outgoing = dict(zip(others, made[0], strict=True))
        self._incoming = dict(zip(others, made[1], strict=True))

    def swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> None:
        """Returns when all is sent and there. Contiguous host memory, by the rank it goes to or
        comes from."""
        largest = max(tensor.nbytes for tensor in (*outgoing.values(), *incoming.values()))
        for start in range(0, largest, self._part_bytes):
            sent = self._pairs(outgoing, self._outgoing, start)
            heard = self._pairs(incoming, self._incoming, start)
            self._copier.up(list(sent.values()))
            with self._lane.work():
                self._talk(sent, heard)
            self._copier.down(list(heard.values()))

    def _talk(self, sent: Mapping[int, Pair], heard: Mapping[int, Pair]) -> None:
        talks = [
            dist.P2POp(way, pair.there, self._members[peer], self._group)
            for way, pairs in ((dist.isend, sent), (dist.irecv, heard))
            for peer, pair in pairs.items()
        ]
        try:
            for work in dist.batch_isend_irecv(talks):
                work.wait()
        except RuntimeError as error:
            peers = ", ".join(map(str, sorted(sent.keys() | heard.keys())))
            raise RankError(
                f"lost one of ranks {peers} while devices sent ({str(error).splitlines()[0]})"
            ) from error

    def _pairs(
        self, tensors: Mapping[int, torch.Tensor], buffers: Mapping[int, torch.Tensor], start: int
    ) -> dict[int, Pair]:
        """Takes those that go on beyond the byte ``start``."""
        pairs = {}
        for peer, tensor in tensors.items():
            part = tensor.view(-1).view(torch.uint8)[start : start + self._part_bytes]
            if len(part):
                pairs[peer] = Pair(part, buffers[peer][: len(part)])
        return pairs

    def close(self, *, is_whole: bool) -> None:
        """``is_whole``: no other rank was lost, for which the backend might wait."""
        self._copier.close()
        if is_whole and dist.is_initialized():
            with suppress(ValueError):  # the program has ended all groups
                dist.destroy_process_group(self._group)


def has_nccl(process_group: Any) -> bool:
    """Says whether its processes send between GPUs by NCCL."""
    try:
        backend = process_group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none for GPUs
        return False
    return bool(backend.name() == "nccl")


def can_link(process_group: Any, device: Device) -> bool:
    """Says whether the process is bound to no other device. ``process_group`` has NCCL."""
    bound = getattr(process_group, "bound_device_id", None)
    return device.torch_device.type == "cuda" and bound in (None, device.torch_device)
