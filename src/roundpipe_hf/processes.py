"""Several processes, each with a pipeline of its own over the devices it owns: what they have to
agree on.

[Note: processes] Each process trains on its share of the data, as with `DistributedDataParallel`.
Gradients are averaged before each update, so that all make the same one. That happens on the
optimizer's thread, while the user's thread may be gathering losses: hence a group of its own, in
which only the optimizer's thread talks during a step. It is a gloo group, because gradients are in
host memory.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


class Processes:
    """Made by all processes at the same time, and its methods called by all, in the same order."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Each ``.grad`` becomes the mean over processes; one that only some have counts as zero in
        the others."""
        is_there = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
        )
        dist.all_reduce(is_there, dist.ReduceOp.MAX, self._group)
        for parameter, is_somewhere in zip(parameters, is_there.tolist(), strict=True):
            if not is_somewhere:
                continue
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = gradient = torch.zeros_like(parameter)
            total = gradient.float()
            dist.all_reduce(total, group=self._group)
            gradient.copy_(total.div_(self._group.size()))

    @torch.no_grad()
    def share(self, model: nn.Module) -> None:
        """Makes trainable weights and buffers those of the first process. Frozen weights are left
        in their files."""
        trained = [
            parameter.detach() for parameter in model.parameters() if parameter.requires_grad
        ]
        for tensor in [*trained, *model.buffers()]:
            sent = tensor.contiguous()
            dist.broadcast(sent, 0, self._group)
            tensor.copy_(sent)


def own_share(devices: Sequence[torch.device], index: int, count: int) -> list[torch.device]:
    """The devices of one of ``count`` processes of a machine: as many for each, neighbours
    together."""
    each = len(devices) // count
    return list(devices[index * each : (index + 1) * each])
