"""Memory in pages of 2 MiB, for what every step reads and writes in full.

With pages of 4 KiB such a pass spends a fifth of its time looking up where they are. Linux gives large ones to whoever
asks before the memory is first touched; where it does not, nothing changes.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE = 2 << 20
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory with arbitrary content. Pages that belong to it only in part stay small: it takes no byte more."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    num_bytes = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - first
    if num_bytes > 0 and _ADVICE is not None:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _ADVICE)
    return tensor


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return empty(shape, dtype).zero_()
