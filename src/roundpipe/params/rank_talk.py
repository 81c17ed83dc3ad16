"""The processes that train one model talk here: who is there, what they agree on, and who is lost
for all of them. See [Note: ranks] in ranks.py."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from ..device import Device
from ..errors import ConfigError, RankError
from ..memory.pinning import HostMemory
from .device_link import DeviceLink, can_link, has_nccl
from .rank_messages import TEXT_BYTES, coded, decoded, own_gloo, own_nccl, timeout_of

_ALIKE = "all ranks have to call the same, for the same weights, also clip_grad_norm_ in step_fn"
LEAST_BY_DEVICE = 1 << 20  # bytes; smaller ones are there sooner by the hosts' network
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class RankTalk:
    """Its methods are called by all ranks in the same order: by the optimizer thread while that has
    jobs, else by the caller. A process that trains alone is the only rank.

    Args:
        process_group: whose ranks they are; each of them makes one of these at the same time.

    Raises:
        ConfigError: it is no process group, or this process is not in it.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.rank, self.count = 0, 1
        self._lost: RankError | None = None
        self._group: Any = None
        self._link: DeviceLink | None = None
        if process_group is None:
            return
        if not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group is {process_group!r}; give a torch.distributed group that this "
                "process is in, such as torch.distributed.group.WORLD after init_process_group()"
            )
        self._timeout = timeout_of(process_group)
        self.rank = dist.get_rank(process_group)
        self.count = dist.get_world_size(process_group)
        if self.count > 1:
            # Of its own, because the caller's thread may talk in the other meanwhile.
            self._group = own_gloo(process_group, self.rank, self.count, self._timeout)

    def __repr__(self) -> str:
        return f"<Ranks: {self.rank} of {self.count}>"

    def link(self, process_group: Any, device: Device, memory: HostMemory) -> None:
        """From here on what is large goes through ``device``, this rank's, if all have one that the
        group given at first sends from by itself. See [Note: device links]."""
        if self.count == 1 or not has_nccl(process_group):
            return
        own = float(can_link(process_group, device))
        if self.combined([own], torch.minimum, "making an engine") == [1.0]:
            group = own_nccl(process_group, self.rank, self.count, self._timeout)
            self._link = DeviceLink(device, group, self.others, memory)

    @property
    def sends_by_device(self) -> bool:
        return self._link is not None

    # Agreeing.

    @contextmanager
    def agreeing(self, what: str, having: Callable[[], str] | None = None) -> Iterator[None]:
        """All ranks raise what one of them raises inside, the others as a RankError that names
        it. From then on there is no agreeing any more.

        Args:
            having: says at the end what this rank has there, which all have to have alike.
        """
        if self.count == 1:
            yield
            return
        self._refuse_lost()
        # As long as what `combined` says in step_fn, which others may be in.
        nothing = torch.zeros(1, dtype=torch.float64)
        try:
            yield
            at_end = what if having is None else f"{what} with {having()}"
        except BaseException as error:
            if self._lost is None:  # else the others have heard, or cannot any more
                with suppress(RankError):
                    said = f"rank {self.rank} raised {type(error).__name__} {what}: {error}"
                    self._talk(what, nothing, torch.maximum, said)
            raise
        self._talk(at_end, nothing, torch.maximum)

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Nothing is told of what is raised inside, as the others would take it for what they
        wait for.
        They lose this rank instead, at once: it cannot go on with them any more."""
        try:
            yield
        except BaseException as error:
            if self.count > 1 and self._lost is None:
                self._note_lost(f"rank {self.rank} raised {type(error).__name__}: {error}")
                self._group = None
            raise

    def combined(
        self, values: Sequence[float], combine: Combine, where: str = "in step_fn"
    ) -> list[float]:
        """``combine`` of all ranks' ``values``, in their order; the same to the bit on all.
        ``where`` they are said, for those that are elsewhere."""
        if self.count == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64)
        return list(map(float, self._talk(where, own, combine)))

    def meet(self, where: str) -> None:
        """Because what follows has a length of its own, which a rank that is elsewhere would not
        expect: gloo ends a process for that, or waits."""
        self.combined([0.0], torch.maximum, where)

    def _talk(
        self, where: str, values: torch.Tensor, combine: Combine, failure: str = ""
    ) -> torch.Tensor:
        """The first rank hears all others and answers them all. The first failure is told, too,
        and a rank that is not ``where`` the first one is."""
        self._refuse_lost()
        with self.exchanging():
            answer = self._answer(where, values, combine, failure)
            said = decoded(answer[:TEXT_BYTES])
        if said:
            raise self._note_lost(said)
        return answer[2 * TEXT_BYTES :].clone().view(values.dtype)

    def _answer(
        self, where: str, values: torch.Tensor, combine: Combine, failure: str
    ) -> torch.Tensor:
        message = torch.cat((coded(failure), coded(where), values.view(torch.uint8)))
        if self.rank != 0:
            answer = torch.empty_like(message)
            with self._losing():
                self._swap({0: message}, {0: answer})
        else:
            heard = {peer: torch.empty_like(message) for peer in self.others}
            failures, result = [failure], values
            for peer, from_peer in list(heard.items()):
                try:
                    self._swap({}, {peer: from_peer})
                except RankError as error:
                    failures.append(str(error))
                    del heard[peer]
                    continue
                told, there = map(decoded, from_peer[: 2 * TEXT_BYTES].split(TEXT_BYTES))
                if there != where and not failure:
                    told = told or f"rank {peer} talks {there}, and rank 0 {where}: {_ALIKE}"
                failures.append(told)
                result = combine(result, from_peer[2 * TEXT_BYTES :].clone().view(values.dtype))
            first = next(filter(None, failures), "")
            answer = torch.cat((coded(first), coded(where), result.view(torch.uint8)))
            with self._losing():
                self._swap(dict.fromkeys(heard, answer), {})
        return answer

    def close(self) -> None:
        """The others are told at once if they wait for this rank."""
        if self._link is not None:
            self._link.close(is_whole=self._lost is None)
            self._link = None
        self._group = None  # which ends it, as nobody else has it

    # Between two.

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.count) if peer != self.rank]

    def exchange(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> None:
        """Returns when all is sent and there. Empty tensors are not sent."""
        large_out, large_in = self._large(outgoing), self._large(incoming)
        with self._losing():
            self._swap(_without(outgoing, large_out), _without(incoming, large_in))
            if self._link is not None and (large_out or large_in):
                self._meet(large_out.keys() | large_in.keys())
                self._link.swap(large_out, large_in)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Inside, a rank may be found to be lost: then for good."""
        self._refuse_lost()
        try:
            yield
        except RankError as error:
            self._group = None  # because whoever waits for this rank would wait in vain
            raise self._note_lost(str(error)) from error

    def _large(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those that go through devices: as many bytes on both sides, so both say the same."""
        if self._link is None:
            return {}
        return {peer: one for peer, one in tensors.items() if one.nbytes >= LEAST_BY_DEVICE}

    def _meet(self, peers: Iterable[int]) -> None:
        """Each waits for the other."""
        here = torch.zeros(1, dtype=torch.uint8)
        self._swap(dict.fromkeys(peers, here), {peer: here.clone() for peer in peers})

    def _swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> None:
        lost = self._tried_to_swap(outgoing, incoming)
        if lost is not None:
            peer, why = lost
            raise RankError(
                f"rank {self.rank} of {self.count} lost rank {peer}, which has ended, or has lost "
                f"another one itself, or did not answer in time ({why})"
            )

    def _tried_to_swap(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> tuple[int, str] | None:
        """The rank that was lost, and why. Not raised from here, because a traceback would keep the
        group, which ends when it is let go of."""
        peer, under_way = -1, []
        try:
            for talk, tensors in ((self._group.recv, incoming), (self._group.send, outgoing)):
                for peer, tensor in tensors.items():
                    if tensor.numel():
                        work: Any = talk([tensor.view(-1).view(torch.uint8)], peer, 0)
                        under_way.append((peer, work, tensor))
            for other, work, _ in under_way:
                peer = other
                work.wait()
        except RuntimeError as error:
            return peer, str(error).splitlines()[0]
        return None

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            raise RankError(
                f"{self._lost}. Since then the ranks cannot go on together: start all processes "
                "again from the last checkpoint"
            )
        if self._group is None:
            raise RankError(
                f"rank {self.rank} of {self.count} talks to the others no more: its engine was "
                "closed"
            )

    def _note_lost(self, why: str) -> RankError:
        self._lost = RankError(why)
        return RankError(why)


def _without(
    tensors: Mapping[int, torch.Tensor], those: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    return {peer: one for peer, one in tensors.items() if peer not in those}
