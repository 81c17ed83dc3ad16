"""Memory for the values in between of one update, kept per thread: fresh memory costs a page fault
per 4 KiB."""

import threading

import torch

CPU = torch.device("cpu")


class _Kept(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], torch.Tensor] = {}


_kept = _Kept()


def scratch(
    name: str, count: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> torch.Tensor:
    """A flat tensor with arbitrary content, valid until this thread asks for the same name again.
    On an accelerator it is new, because the allocator there keeps memory itself."""
    if device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    tensor = _kept.tensors.get((name, dtype))
    if tensor is None or tensor.numel() < count:
        tensor = _kept.tensors[name, dtype] = torch.empty(count, dtype=dtype)
    return tensor[:count]
