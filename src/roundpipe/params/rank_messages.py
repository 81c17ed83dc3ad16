"""Messages go from one rank to another: parameters side by side, or a text. This is what they look
like, and the way they go."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from ..errors import RankError

TEXT_BYTES = 400
_ALIGNMENT = 16  # elements


class Flat(NamedTuple):
    """What goes from one rank to another at once, and the places of parameters in it."""

    tensor: torch.Tensor
    parts: list[tuple[nn.Parameter, torch.Tensor]]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> "Flat":
        ends = [0]
        for parameter in parameters:
            ends.append(ends[-1] + -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT)
        tensor = torch.zeros(ends[-1], dtype=dtype)
        parts = [
            (parameter, tensor[begin : begin + parameter.numel()].view(parameter.shape))
            for parameter, begin in zip(parameters, ends[:-1], strict=True)
        ]
        return cls(tensor, parts)


def coded(text: str) -> torch.Tensor:
    return torch.tensor(
        list(text.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8
    )


def decoded(head: torch.Tensor) -> str:
    return bytes(head.tolist()).rstrip(b"\0").decode(errors="replace")


def own_gloo(process_group: Any, rank: int, count: int, timeout: timedelta | None) -> Any:
    """A backend of gloo's over the same processes, which make it at the same time.

    Raises:
        RankError: some have not come in time.
    """
    given = {} if timeout is None else {"timeout": timeout}
    store = _own_store(process_group, rank, "hosts")
    try:
        return dist.ProcessGroupGloo(store, rank, count, **given)
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {count} has not met all others to make an engine: each has to make it "
            f"at the same time as often as the others ({str(error).splitlines()[0]})"
        ) from error


def own_nccl(process_group: Any, rank: int, count: int, timeout: timedelta | None) -> Any:
    """A backend of NCCL's over the same processes, which meet in what it does first."""
    options = dist.ProcessGroupNCCL.Options()
    if timeout is not None:
        options._timeout = timeout
    options.global_ranks_in_group = dist.get_process_group_ranks(process_group)
    store = _own_store(process_group, rank, "devices")
    return dist.ProcessGroupNCCL(store, rank, count, options)


def _own_store(process_group: Any, rank: int, what: str) -> Any:
    """Those processes meet there for a backend that is the engine's own.

    Not by torch's `new_group`: that names groups of some processes by how many groups the process
    is in, in which they may differ, and then they wait for each other under different names.
    """
    store = _get_process_group_store(process_group)
    # Of those that this rank has made within the group.
    number = store.add(f"roundpipe/{what}/{rank}", 1)
    return PrefixStore(f"roundpipe/{what}-{number}", store)


def timeout_of(process_group: Any) -> timedelta | None:
    """That of its backend for host memory, or for the devices; None for gloo's own."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):
            backend: Any = process_group._get_backend(torch.device(device))
            timeout: timedelta = backend.options._timeout
            return timeout
    return None
