"""Counts the bytes of mapped files that a process has made its own, and those in memory, as the
kernel does. Linux only."""

import ctypes
import mmap
from pathlib import Path

import torch


def private_bytes(folder: Path) -> int:
    """Bytes of this process's mappings of the folder's safetensors files that were written, so
    copied, since."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the first line of a mapping
            is_ours = str(folder) in line and ".safetensors" in line
        elif is_ours and name == "Anonymous:":
            total += int(values[0]) * 1024
    return total


def cached_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the pages that the tensor lies in which are in memory, mapped or not."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    is_there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), is_there) == 0
    return sum(flag & 1 for flag in is_there) * mmap.PAGESIZE
