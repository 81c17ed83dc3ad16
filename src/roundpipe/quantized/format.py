"""How weights of each format are quantized and dequantized, in plain torch: the one definition, on
the host and on devices.

[Note: formats] A weight is some plain tensors, its *parts*, as checkpoint files hold them; what is
the same for a whole weight (block sizes, one offset) is the format's own. Dequantizing works in
float32, rounds once to the weight's dtype, and goes block by block through scratch memory of a few
megabytes, whatever the size of the weight.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch

from ..errors import ConfigError
from ..kernels import triton_kernels

# Elements that are dequantized at once. As float32 4 MB, which stay in a core's cache; on a device
# 32 MB, so that launching costs less than computing.
_CHUNK, _DEVICE_CHUNK = 2**20, 2**23
Parts = Sequence[torch.Tensor]
Shape = Sequence[int]


@dataclass(frozen=True)
class Format(ABC):
    """One way to hold a weight in fewer bits. Formats are values: equal ones read the same parts
    alike."""

    name: ClassVar[str]

    @abstractmethod
    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of ``weight``, on its device. Raises what ``check_shape`` does."""

    @abstractmethod
    def check_shape(self, shape: Sequence[int]) -> None:
        """Raises ConfigError if a weight of that shape does not divide into blocks."""

    @abstractmethod
    def check(self, parts: Parts, shape: Sequence[int]) -> None:
        """Raises ConfigError if ``parts`` are not those of a weight of that shape."""

    @abstractmethod
    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        """Writes the weight to ``out``: contiguous, of the weight's shape, on the parts' device."""

    def join(self, weights: Sequence[Parts], shapes: Sequence[Shape], dim: int) -> Parts:
        """The parts of weights put together along ``dim``, without a value changed.

        Args:
            shapes: of the weights, equal but for that dimension.

        Raises:
            ConfigError: the weights' blocks would not stay whole.
        """
        raise ConfigError(f"{self.name}: weights cannot be put together; load them dequantized")

    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The weight as a new dense tensor, on the parts' device."""
        out = torch.empty(tuple(shape), dtype=dtype, device=parts[0].device)
        self.dequantize_into(parts, out)
        return out

    def expect(self, part: torch.Tensor, what: str, count: int, dtype: torch.dtype) -> None:
        """Raises ConfigError if a part has another size or dtype."""
        if part.numel() != count or part.dtype != dtype:
            raise ConfigError(
                f"{self.name}: {what} has {part.numel()} elements of {part.dtype}; this weight "
                f"takes {count} of {dtype}. The checkpoint is damaged or of another format"
            )


def kernels_for(parts: Parts, out: torch.Tensor) -> ModuleType | None:
    """`kernels/dequantize.py`, if it is for these."""
    is_plain = out.is_contiguous() and all(part.is_contiguous() for part in parts)
    return triton_kernels("dequantize") if out.is_cuda and out.numel() and is_plain else None


def pieces(count: int, device: torch.device, block: int = 1, width: int = 1) -> Iterator[slice]:
    """From 0 to ``count`` in some steps, each of whole blocks, for ``width`` elements each."""
    most = _CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    step = max(most // max(block * width, 1), 1) * block
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
