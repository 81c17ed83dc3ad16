"""What goes from one rank to another at once: parameters side by side, or a text."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import nn

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
        list(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8
    )


def decoded(head: torch.Tensor) -> str:
    return bytes(head.tolist()).rstrip(b"\0").decode(errors="replace")


def timeout_of(process_group: Any) -> timedelta | None:
    """That of its backend for host memory, or for the devices; None for gloo's own."""
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError):
            backend: Any = process_group._get_backend(torch.device(device))
            timeout: timedelta = backend.options._timeout
            return timeout
    return None
