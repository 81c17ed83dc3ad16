"""Large tensors go from rank to rank through their devices, where these have a way to each other
that is faster than the hosts' network.

[Note: device links] It stays host memory for whoever sends and whoever gets it. A part at a time
goes up to this rank's device, from device to device, and down on the other side: on a lane of its
own, so that it waits for nothing that calls have queued, and by a communicator of its own, because
the user may talk in the group's. Whoever sends has heard before that the other one is there, since
a device would wait for one that has ended until the group's timeout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

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
        group: a backend of its own, of NCCL's, which sends between such devices.
        others: the ranks besides this one.
    """

    def __init__(
        self,
        device: Device,
        group: Any,
        others: Sequence[int],
        memory: HostMemory,
    ) -> None:
        self._group = group
        self._part_bytes = _BUFFER_BYTES // len(others)
        self._lane = device.new_lane()
        self._copier = PinnedCopier(self._lane, memory, _BUFFER_BYTES)
        with self._lane.work():
            made = torch.zeros(
                2, len(others), self._part_bytes, dtype=torch.uint8, device=device.torch_device
            )
            # Because two alone cannot begin a communicator.
            group.allreduce([made[0, 0, :1]]).wait()
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
        try:
            # Because each would otherwise wait for the one before it, on both sides.
            self._group._start_coalescing()
            for talk, pairs in ((self._group.send, sent), (self._group.recv, heard)):
                for peer, pair in pairs.items():
                    talk([pair.there], peer, 0)
            self._group._end_coalescing().wait()
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
        if is_whole:
            self._group.shutdown()
        else:
            self._group.abort()


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
