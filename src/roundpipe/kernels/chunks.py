"""Gradients as they were offloaded, a cache-sized chunk at a time: for rules, and machines, without
a kernel of our own.

A chunk of a 16-bit gradient is cast into a buffer that stays in the cache, torch's kernels update
master and moments from there, and the new weights are copied on while they are still near: the fp32
gradient never exists in memory.
"""

from collections.abc import Iterator, Sequence

import torch

from ..memory.scratch import scratch

_CHUNK = 1 << 22  # elements: 16 MiB of fp32; with smaller ones threads spend their time waking up


def chunks(
    parts: Sequence[torch.Tensor], scale: float = 1.0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of the flat gradient and their values in fp32, times ``scale``. Each is valid until
    the next, not to be written.

    Args:
        parts: tensors of one shape whose sum is the gradient.
    """
    first, *others = [part.reshape(-1).cpu() for part in parts]
    for start in range(0, first.numel(), _CHUNK):
        where = slice(start, min(start + _CHUNK, first.numel()))
        if first.dtype is torch.float32 and not others and scale == 1.0:
            yield where, first[where]
            continue
        values = scratch("gradient", where.stop - where.start).copy_(first[where])
        for other in others:
            values.add_(other[where])
        yield where, values if scale == 1.0 else values.mul_(scale)
