"""Weights in four bits: from a table, and as floats with a power of two."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ..errors import ConfigError
from .format import Format, Parts, Shape, kernels_for, pieces


@dataclass(frozen=True)
class NF4(Format):
    """Four bits a weight into a table of the quantiles of a normal distribution, times the largest
    magnitude of its block (Dettmers et al., QLoRA, 2023; layout of bitsandbytes).

    Parts: ``(n / 2, 1)`` uint8 with the first of two weights in the high bits; magnitudes; the
    table of 16. Magnitudes are ``(n / block_size,)`` float32, or, *nested*, uint8 into a table of
    256 (a fourth part), times the magnitude of *their* block (a fifth), plus ``offset``.

    [Note: nested magnitudes] Files bring the table. The one that is made here has the squares of
    even steps, and no offset: magnitudes are not negative, and those beside a much larger one keep
    some precision. They are 0.3 % off on average, and take 0.127 bits of a weight in place of 0.5.
    """

    name = "nf4"
    block_size: int = 64
    nested_block_size: int = 0  # 0: magnitudes are float32
    offset: float = 0.0

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.offset:
            raise ConfigError(
                f"nf4: weights are quantized without an offset of magnitudes, not {self.offset}"
            )
        self.check_shape(weight.shape)
        table = nf4_table().to(weight.device)
        packed = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8, device=weight.device)
        magnitudes = torch.empty(weight.numel() // self.block_size, device=weight.device)
        # Between neighbours of the table, because the nearest of them is meant.
        bounds = (table[1:] + table[:-1]) / 2
        flat = weight.detach().reshape(-1)
        for piece in pieces(weight.numel(), weight.device, self.block_size):
            blocks = flat[piece].float().view(-1, self.block_size)
            largest = blocks.abs().amax(1)
            magnitudes[piece.start // self.block_size : piece.stop // self.block_size] = largest
            scaled = blocks * torch.where(largest > 0, 1 / largest, 0)[:, None]
            codes = torch.bucketize(scaled.view(-1), bounds, out_int32=True).to(torch.uint8)
            packed[piece.start // 2 : piece.stop // 2, 0] = codes[0::2] << 4 | codes[1::2]
        if self.nested_block_size:
            codes, steps, outer = self._nested(magnitudes)
            return packed, codes, table, steps, outer
        return packed, magnitudes, table

    def _nested(self, magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, their table and the largest of each block. See [Note: nested magnitudes]."""
        steps = (torch.arange(256, device=magnitudes.device) / 255).square()
        blocks = magnitudes.split(self.nested_block_size)
        outer = torch.stack([block.amax() for block in blocks])
        sizes = outer.repeat_interleave(self.nested_block_size)[: magnitudes.numel()]
        fractions = torch.where(sizes > 0, magnitudes / sizes, 0)
        codes = torch.bucketize(fractions, (steps[1:] + steps[:-1]) / 2, out_int32=True)
        return codes.to(torch.uint8), steps, outer

    def check_shape(self, shape: Sequence[int]) -> None:
        if math.prod(shape) % self.block_size:
            raise ConfigError(
                f"nf4: {math.prod(shape)} weights of shape {tuple(shape)} do not divide into "
                f"blocks of {self.block_size}; leave this weight as it is"
            )

    def check(self, parts: Parts, shape: Sequence[int]) -> None:
        if self.block_size < 1 or self.nested_block_size < 0:
            raise ConfigError(
                f"nf4: blocks of {self.block_size} and {self.nested_block_size}; the checkpoint is "
                "damaged or of another format"
            )
        count = math.prod(shape)
        blocks = -(-count // self.block_size)
        is_nested = self.nested_block_size > 0
        if len(parts) != (5 if is_nested else 3):
            raise ConfigError(f"nf4: {len(parts)} parts where {5 if is_nested else 3} are needed")
        self.expect(parts[0], "the packed weight", -(-count // 2), torch.uint8)
        self.expect(parts[1], "absmax", blocks, torch.uint8 if is_nested else torch.float32)
        self.expect(parts[2], "the table", 16, torch.float32)
        if is_nested:
            self.expect(parts[3], "the table of absmax", 256, torch.float32)
            outer = -(-blocks // self.nested_block_size)
            self.expect(parts[4], "nested absmax", outer, torch.float32)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = kernels_for(parts, out)
        if kernels is not None:
            nested = None
            if self.nested_block_size:
                nested = parts[3], parts[4], self.nested_block_size, self.offset
            kernels.four_bits_of_a_table(*parts[:3], out, block_size=self.block_size, nested=nested)
            return
        packed, table, flat = parts[0].reshape(-1), parts[2], out.view(-1)
        # Both weights of a byte at once: (256, 2), the high bits' first.
        pairs = torch.stack((table.repeat_interleave(16), table.repeat(16)), 1)
        for piece in pieces(flat.numel(), flat.device, self.block_size):
            codes = packed[piece.start // 2 : -(-piece.stop // 2)].int()
            values = pairs.index_select(0, codes).view(-1)[: piece.stop - piece.start]
            sizes = self._magnitudes(parts, piece)
            if values.numel() % self.block_size:
                sizes = sizes.repeat_interleave(self.block_size)[: values.numel()]
            else:
                values, sizes = values.view(-1, self.block_size), sizes[:, None]
            flat[piece] = values.mul_(sizes).view(-1)

    def join(self, weights: Sequence[Parts], shapes: Sequence[Shape], dim: int) -> Parts:
        size = self.block_size * max(self.nested_block_size, 1)
        if any(math.prod(shape[dim:]) % size for shape in shapes):
            raise ConfigError(
                f"nf4: weights of shape {tuple(shapes[0])} cannot be put together along dimension "
                f"{dim} in whole blocks of {size}; load them dequantized"
            )
        outer = math.prod(shapes[0][:dim])

        def joined(part: int) -> torch.Tensor:
            return torch.cat([parts[part].view(outer, -1) for parts in weights], 1).view(-1)

        made = (joined(0).view(-1, 1), joined(1), weights[0][2])
        return (*made, weights[0][3], joined(4)) if self.nested_block_size else made

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
        self.expect(parts[0], "the blocks", math.prod(shape) // 2, torch.uint8)
        self.expect(parts[1], "the scales", math.prod(shape) // 32, torch.uint8)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = kernels_for(parts, out)
        if kernels is not None:
            kernels.four_bit_floats(*parts, out)
            return
        blocks, scales = parts
        numbers = torch.tensor(_FP4 + tuple(-x for x in _FP4), device=out.device)
        # Both weights of a byte at once: (256, 2), the low bits' first.
        pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), 1)
        for one, packed, scale in zip(out, blocks, scales, strict=True):
            for rows in pieces(one.shape[1], out.device, width=one.shape[0]):
                values = pairs.index_select(0, packed[rows].reshape(-1).int())
                exponents = scale[rows].reshape(-1, 1).int() - 127
                wide = torch.ldexp(values.view(-1, 32), exponents)
                one[:, rows] = wide.view(-1, one.shape[0]).t().to(out.dtype)
