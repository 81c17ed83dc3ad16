"""Updates on gradients as they landed, a cache-sized chunk at a time.

A chunk of a 16-bit gradient is cast into a buffer that stays in the cache, and torch's fused kernel updates master and
moments from there: the fp32 gradient never exists in memory, so the pass moves 26 bytes per parameter instead of 42.
torch's kernels let go of the interpreter while they run. A ``torch.compile``d pass moves as little but holds on to it,
and so stops the threads that feed the devices for as long as it takes.
"""

import math
from collections.abc import Iterator, Sequence

import torch

_CHUNK = 1 << 22  # elements: 16 MiB of fp32; with smaller ones threads spend their time waking up


class ChunkBuffer:
    """The fp32 buffer that chunks are cast into. One per optimizer thread."""

    def __init__(self) -> None:
        self._buffer = torch.empty(_CHUNK)

    def chunks(self, parts: Sequence[torch.Tensor], scale: float = 1.0) -> Iterator[tuple[slice, torch.Tensor]]:
        """Slices of the flat gradient and their values in fp32, times ``scale``. Each is valid until the next.

        Args:
            parts: tensors of one shape whose sum is the gradient.
        """
        first, *others = [part.reshape(-1) for part in parts]
        for start in range(0, first.numel(), _CHUNK):
            where = slice(start, min(start + _CHUNK, first.numel()))
            if first.dtype is torch.float32 and not others and scale == 1.0:
                yield where, first[where]
                continue
            values = self._buffer[: where.stop - where.start].copy_(first[where])
            for other in others:
                values.add_(other[where])
            yield where, values if scale == 1.0 else values.mul_(scale)

    def sum_of_squares(self, parts: Sequence[torch.Tensor]) -> float:
        """Products are summed in fp32 within a chunk and in double over chunks."""
        return math.fsum(float(torch.dot(values, values)) for _, values in self.chunks(parts))
