"""How weights of each format are quantized and dequantized, in plain torch: the one definition, on
the host and on devices.

[Note: formats] A weight is some plain tensors, its *parts*, as checkpoint files hold them; what is
the same for a whole weight (block sizes, one offset) is the format's own. Dequantizing works in
float32, rounds once to the weight's dtype, and goes block by block through scratch memory of a few
megabytes, whatever the size of the weight.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from ..errors import ConfigError

_CHUNK = 2**20  # elements that are dequantized at once: 4 MB as float32
Parts = Sequence[torch.Tensor]


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

    def dequantize(self, parts: Parts, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The weight as a new dense tensor, on the parts' device."""
        out = torch.empty(tuple(shape), dtype=dtype, device=parts[0].device)
        self.dequantize_into(parts, out)
        return out

    def _expect(self, part: torch.Tensor, what: str, count: int, dtype: torch.dtype) -> None:
        if part.numel() != count or part.dtype != dtype:
            raise ConfigError(
                f"{self.name}: {what} has {part.numel()} elements of {part.dtype}; this weight "
                f"takes {count} of {dtype}. The checkpoint is damaged or of another format"
            )


# Four bits, from a table.


@dataclass(frozen=True)
class NF4(Format):
    """Four bits a weight into a table of the quantiles of a normal distribution, times the largest
    magnitude of its block (Dettmers et al., QLoRA, 2023; layout of bitsandbytes).

    Parts: ``(n / 2, 1)`` uint8 with the first of two weights in the high bits; magnitudes; the
    table of 16. Magnitudes are ``(n / block_size,)`` float32, or, *nested*, uint8 into a table of
    256 (a fourth part), times the magnitude of *their* block (a fifth), plus ``offset``.
    """

    name = "nf4"
    block_size: int = 64
    nested_block_size: int = 0  # 0: magnitudes are float32
    offset: float = 0.0

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.nested_block_size:
            raise ConfigError(
                "nf4: weights are quantized with float32 magnitudes here; nested ones are only read"
            )
        self.check_shape(weight.shape)
        table = nf4_table().to(weight.device)
        packed = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8, device=weight.device)
        magnitudes = torch.empty(weight.numel() // self.block_size, device=weight.device)
        # Between neighbours of the table, because the nearest of them is meant.
        bounds = (table[1:] + table[:-1]) / 2
        flat = weight.detach().reshape(-1)
        for piece in _pieces(weight.numel(), self.block_size):
            blocks = flat[piece].float().view(-1, self.block_size)
            largest = blocks.abs().amax(1)
            magnitudes[piece.start // self.block_size : piece.stop // self.block_size] = largest
            scaled = blocks * torch.where(largest > 0, 1 / largest, 0)[:, None]
            codes = torch.bucketize(scaled.view(-1), bounds, out_int32=True).to(torch.uint8)
            packed[piece.start // 2 : piece.stop // 2, 0] = codes[0::2] << 4 | codes[1::2]
        return packed, magnitudes, table

    def check_shape(self, shape: Sequence[int]) -> None:
        if math.prod(shape) % self.block_size:
            raise ConfigError(
                f"nf4: {math.prod(shape)} weights of shape {tuple(shape)} do not divide into "
                f"blocks of {self.block_size}; leave this weight as it is"
            )

    def check(self, parts: Parts, shape: Sequence[int]) -> None:
        count = math.prod(shape)
        blocks = -(-count // self.block_size)
        is_nested = self.nested_block_size > 0
        if len(parts) != (5 if is_nested else 3):
            raise ConfigError(f"nf4: {len(parts)} parts where {5 if is_nested else 3} are needed")
        self._expect(parts[0], "the packed weight", -(-count // 2), torch.uint8)
        self._expect(parts[1], "absmax", blocks, torch.uint8 if is_nested else torch.float32)
        self._expect(parts[2], "the table", 16, torch.float32)
        if is_nested:
            self._expect(parts[3], "the table of absmax", 256, torch.float32)
            outer = -(-blocks // self.nested_block_size)
            self._expect(parts[4], "nested absmax", outer, torch.float32)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        packed, table, flat = parts[0].reshape(-1), parts[2], out.view(-1)
        # Both weights of a byte at once: (256, 2), the high bits' first.
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)
        for piece in _pieces(flat.numel(), self.block_size):
            codes = packed[piece.start // 2 : -(-piece.stop // 2)].int()
            values = pairs.index_select(0, codes).view(-1)[: piece.stop - piece.start]
            sizes = self._magnitudes(parts, piece)
            if values.numel() % self.block_size:
                sizes = sizes.repeat_interleave(self.block_size)[: values.numel()]
            else:
                values, sizes = values.view(-1, self.block_size), sizes[:, None]
            flat[piece] = values.mul_(sizes).view(-1)

    def _magnitudes(self, parts: Parts, piece: slice) -> torch.Tensor:
        blocks = slice(piece.start // self.block_size, -(-piece.stop // self.block_size))
        if not self.nested_block_size:
            return parts[1][blocks]
        fractions = parts[3].index_select(0, parts[1][blocks].int())
        index = torch.arange(blocks.start, blocks.stop, device=fractions.device)
        return fractions * parts[4][index // self.nested_block_size] + self.offset


@cache
def nf4_table() -> torch.Tensor:
    """(16,) float32: seven quantiles of the normal distribution below 0, 0, eight above, scaled to
    [-1, 1] (QLoRA, appendix E, as printed there: computed ones differ in the last bits)."""
    return torch.tensor(
        [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ]
    )


# Eight bits, and a scale.


@dataclass(frozen=True)
class FP8(Format):
    """float8 (e4m3) weights times a float32 scale for each square block (the files of DeepSeek-V3
    and Qwen3 FP8, whose ``weight_scale_inv`` is multiplied).

    Parts: ``(..., rows, columns)`` float8_e4m3fn; ``(..., rows / block, columns / block)`` float32,
    rounded up.
    """

    name = "fp8"
    block_size: int = 128

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.check_shape(weight.shape)
        values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty(self._scales_shape(weight.shape), device=weight.device)
        most = torch.finfo(torch.float8_e4m3fn).max
        for dense, quantized, scale in self._rows(weight.detach(), values, scales):
            wide = torch.nn.functional.pad(
                dense.float(), (0, -dense.shape[1] % self.block_size)
            ).abs()
            largest = wide.view(len(dense), -1, self.block_size).amax((0, 2))
            scale.copy_(torch.where(largest > 0, largest / most, 1.0))
            quantized.copy_(dense.float() / self._spread(scale, dense.shape[1]))
        return values, scales

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 2:
            raise ConfigError(
                f"fp8: a weight of shape {tuple(shape)} has no blocks of rows and columns; leave "
                "it as it is"
            )

    def check(self, parts: Parts, shape: Sequence[int]) -> None:
        if len(parts) != 2 or len(shape) < 2:
            raise ConfigError(f"fp8: {len(parts)} parts for a weight of shape {tuple(shape)}")
        self._expect(parts[0], "the weight", math.prod(shape), torch.float8_e4m3fn)
        count = math.prod(self._scales_shape(shape))
        self._expect(parts[1], "weight_scale_inv", count, torch.float32)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        for dense, quantized, scale in self._rows(out, *parts):
            dense.copy_(quantized.float() * self._spread(scale, dense.shape[1]))

    def _scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *stacked, rows, columns = shape
        return *stacked, -(-rows // self.block_size), -(-columns // self.block_size)

    def _spread(self, scale: torch.Tensor, columns: int) -> torch.Tensor:
        return scale.repeat_interleave(self.block_size)[:columns]

    def _rows(
        self, dense: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Rows of the three that share scales."""
        shape = dense.shape[-2:]
        values, scales = values.view(-1, *shape), scales.view(-1, *self._scales_shape(shape))
        for one, quantized, scale in zip(dense.view(-1, *shape), values, scales, strict=True):
            for number, start in enumerate(range(0, shape[0], self.block_size)):
                rows = slice(start, start + self.block_size)
                yield one[rows], quantized[rows], scale[number]


@dataclass(frozen=True)
class INT8(Format):
    """int8 weights times a float32 scale for each row: the largest magnitude of the row is 127.

    Parts: ``(..., columns)`` int8; ``(...,)`` float32.
    """

    name = "int8"

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.check_shape(weight.shape)
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scales = torch.empty(weight.shape[:-1], device=weight.device)
        for dense, quantized, scale in self._rows(weight.detach(), values, scales):
            largest = dense.float().abs().amax(1)
            scale.copy_(torch.where(largest > 0, largest / 127, 1.0))
            quantized.copy_((dense.float() / scale[:, None]).round_())
        return values, scales

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) < 2:
            raise ConfigError(
                f"int8: a weight of shape {tuple(shape)} has no rows; leave it as it is"
            )

    def check(self, parts: Parts, shape: Sequence[int]) -> None:
        if len(parts) != 2 or len(shape) < 2:
            raise ConfigError(f"int8: {len(parts)} parts for a weight of shape {tuple(shape)}")
        self._expect(parts[0], "the weight", math.prod(shape), torch.int8)
        self._expect(parts[1], "the scale", math.prod(shape[:-1]), torch.float32)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        for dense, quantized, scale in self._rows(out, *parts):
            dense.copy_(quantized.float() * scale[:, None])

    def _rows(
        self, dense: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        columns = dense.shape[-1]
        dense, values, scales = dense.view(-1, columns), values.view(-1, columns), scales.view(-1)
        for rows in _pieces(len(dense), 1, max(_CHUNK // max(columns, 1), 1)):
            yield dense[rows], values[rows], scales[rows]


# Four bits, and a power of two.

# The sixteen numbers of one sign bit, two bits of exponent and one of mantissa (OCP Microscaling
# Formats 1.0, section 5.3.3).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class MXFP4(Format):
    """Four-bit floats of stacked experts, times a power of two for each 32 of a row (OCP
    Microscaling Formats 1.0; the files of gpt-oss).

    The dense weight is ``(experts, columns, rows)``, as gpt-oss multiplies by it. Parts:
    ``(experts, rows, columns / 32, 16)`` uint8 with the first of two weights in the low bits;
    ``(experts, rows, columns / 32)`` uint8, exponents plus 127.
    """

    name = "mxfp4"

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.check_shape(weight.shape)
        experts, columns, rows = weight.shape
        blocks = torch.empty(
            experts, rows, columns // 32, 16, dtype=torch.uint8, device=weight.device
        )
        scales = torch.empty(blocks.shape[:-1], dtype=torch.uint8, device=weight.device)
        numbers = torch.tensor(_FP4, device=weight.device)
        # Halves go to the even code, as in rounding to the nearest even number: below it for 0.25
        # (code 0), above it for 0.75 (code 2), and so on.
        bounds = (numbers[1:] + numbers[:-1]) / 2
        for index in range(experts):
            dense = weight[index].detach().float().t().contiguous().view(rows, -1, 32)
            exponents = torch.frexp(dense.abs().amax(-1)).exponent - 3  # the largest is below 8
            exponents = exponents.clamp_(-127, 127)
            scales[index] = (exponents + 127).to(torch.uint8)
            scaled = torch.ldexp(dense, -exponents[..., None])
            below = torch.bucketize(scaled.abs(), bounds)
            above = torch.bucketize(scaled.abs(), bounds, right=True)
            codes = torch.where(below % 2 == 0, below, above).to(torch.uint8)
            codes += 8 * scaled.signbit().to(torch.uint8)
            blocks[index] = codes[..., 0::2] | codes[..., 1::2] << 4
        return blocks, scales

    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) != 3 or shape[1] % 32:
            raise ConfigError(
                f"mxfp4: a weight of shape {tuple(shape)} is no stack of experts whose second "
                "dimension divides into blocks of 32; leave it as it is"
            )

    def check(self, parts: Parts, shape: Sequence[int]) -> None:
        if len(parts) != 2 or len(shape) != 3 or shape[1] % 32:
            raise ConfigError(f"mxfp4: {len(parts)} parts for a weight of shape {tuple(shape)}")
        self._expect(parts[0], "the blocks", math.prod(shape) // 2, torch.uint8)
        self._expect(parts[1], "the scales", math.prod(shape) // 32, torch.uint8)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        blocks, scales = parts
        numbers = torch.tensor(_FP4 + tuple(-x for x in _FP4), device=out.device)
        # Both weights of a byte at once: (256, 2), the low bits' first.
        pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1)
        for one, packed, scale in zip(out, blocks, scales, strict=True):
            step = max(_CHUNK // max(one.shape[0], 1), 1)
            for rows in _pieces(one.shape[1], 1, step):
                values = pairs.index_select(0, packed[rows].reshape(-1).int())
                exponents = scale[rows].reshape(-1, 1).int() - 127
                wide = torch.ldexp(values.view(-1, 32), exponents)
                one[:, rows] = wide.view(-1, one.shape[0]).t().to(out.dtype)


def _pieces(count: int, block: int, step: int = _CHUNK) -> Iterator[slice]:
    """From 0 to ``count`` in some steps, each of whole blocks."""
    step = max(step // block, 1) * block
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


FORMATS: dict[str, Format] = {one.name: one for one in (NF4(), FP8(), INT8(), MXFP4())}
