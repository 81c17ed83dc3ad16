"""The processes that train one model together: what they sum, share out and have to agree on.

[Note: ranks] Each rank runs its own part of the batch. One rank *owns* a parameter: it gets the sum
of all ranks' gradients, has the master and the moments, and sends the new weight to the others,
whose master holds that weight, in the weight's dtype. All of it is said between two ranks at a
time, so that an error says which one was lost. docs/internals/several-processes.md has the order.
"""

import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .rank_messages import Flat
from .rank_talk import RankTalk
from .window import Master


class Ranks(RankTalk):
    """Ranks of which each owns some of the parameters. See `RankTalk` for who they are."""

    def __init__(self, process_group: Any = None) -> None:
        self._owners: dict[int, int] = {}  # by the parameter's id
        super().__init__(process_group)

    # Who has what.

    def assign(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gives each parameter an owner: in order, to the rank that has the fewest bytes so far.
        Frozen ones count apart, because they may train one day."""
        for trains in (True, False):
            loads = [0] * self.count
            for parameter in parameters:
                if parameter.requires_grad == trains:
                    owner = loads.index(min(loads))
                    self._owners[id(parameter)] = owner
                    loads[owner] += parameter.nbytes

    def owner_of(self, parameter: nn.Parameter) -> int:
        return self._owners.get(id(parameter), 0)

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has the parameter's master and moments."""
        return self.count == 1 or self.owner_of(parameter) == self.rank

    # Weights.

    @torch.no_grad()
    def spread(self, masters: Iterable[tuple[nn.Parameter, Master]]) -> None:
        """Owners send their new weights to the others' masters, rounded to the weights' dtype."""
        by_parameter = dict(masters)
        for flats in self.flats({parameter: parameter.dtype for parameter in by_parameter}):
            mine = flats[self.rank]
            for parameter, part in mine.parts:
                part.copy_(by_parameter[parameter].data)
            self.exchange(
                dict.fromkeys(self.others, mine.tensor),
                {peer: flats[peer].tensor for peer in self.others},
            )
            for peer in self.others:
                for parameter, part in flats[peer].parts:
                    by_parameter[parameter].data.copy_(part)

    @torch.no_grad()
    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Makes them those of the first rank. What is equal already is not written."""
        if self.count == 1:
            return
        shared = list(tensors)
        # Because gloo takes a shorter message for a longer one, and leaves the rest as it was.
        kinds = zlib.crc32(str([(one.shape, one.dtype) for one in shared]).encode())
        elements = sum(map(torch.Tensor.numel, shared))
        self.meet(f"sharing {len(shared)} tensors, {elements} elements (shapes {kinds:08x})")
        with self.exchanging():
            for tensor in shared:
                sent = tensor.detach().contiguous()
                if self.rank == 0:
                    self.exchange(dict.fromkeys(self.others, sent), {})
                    continue
                first = torch.empty_like(sent)
                self.exchange({}, {0: first})
                if not torch.equal(first, sent):
                    tensor.copy_(first)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Each ``.grad`` becomes the mean over ranks, where one that is not there is zero."""
        own = list(parameters)
        self.meet("averaging gradients")
        are_there = self.combined([float(one.grad is not None) for one in own], torch.maximum)
        shared = [one for one, is_there in zip(own, are_there, strict=True) if is_there]
        with self.exchanging():
            for parameter in shared:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                total = parameter.grad.to(dtype, copy=True)
                self._group.allreduce([total]).wait()
                parameter.grad.copy_(total.div_(self.count))

    def gathered(
        self, tensors: Mapping[str, torch.Tensor], extra: Any, where: str = "gathering state"
    ) -> tuple[dict[str, torch.Tensor], list[Any]] | None:
        """The ``tensors`` of all ranks, which have names of their own, and each one's ``extra``, on
        the first rank; None on the others."""
        if self.count == 1:
            return dict(tensors), [extra]
        self.meet(where)
        with self.exchanging():
            return self._gathered(tensors, extra)

    def _gathered(
        self, tensors: Mapping[str, torch.Tensor], extra: Any
    ) -> tuple[dict[str, torch.Tensor], list[Any]] | None:
        own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        if self.rank != 0:
            entries = [(name, tensor.dtype, tensor.shape) for name, tensor in own.items()]
            told = torch.frombuffer(bytearray(pickle.dumps((entries, extra))), dtype=torch.uint8)
            for tensor in (torch.tensor(len(told)), told, *own.values()):
                self.exchange({0: tensor}, {})
            return None
        extras = [extra]
        for peer in self.others:
            size = self._heard(peer, torch.int64, ())
            told = self._heard(peer, torch.uint8, (int(size),))
            entries, of_peer = pickle.loads(told.numpy().tobytes())
            extras.append(of_peer)
            own |= {name: self._heard(peer, dtype, shape) for name, dtype, shape in entries}
        return own, extras

    def _heard(self, peer: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.exchange({}, {peer: tensor})
        return tensor

    def flats(self, dtypes: Mapping[nn.Parameter, torch.dtype]) -> Iterator["list[Flat]"]:
        """For each dtype one for each rank, with what that owns."""
        by_dtype: dict[torch.dtype, list[list[nn.Parameter]]] = defaultdict(
            lambda: [[] for _ in range(self.count)]
        )
        for parameter, dtype in dtypes.items():
            by_dtype[dtype][self.owner_of(parameter)].append(parameter)
        for dtype, owned in by_dtype.items():
            yield [Flat.of(parameters, dtype) for parameters in owned]
