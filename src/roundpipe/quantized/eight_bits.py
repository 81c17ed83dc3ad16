"""Weights in eight bits and scales: for square blocks, and for rows."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .format import Format, Parts, Shape, kernels_for, pieces


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
        self.expect(parts[0], "the weight", math.prod(shape), torch.float8_e4m3fn)
        count = math.prod(self._scales_shape(shape))
        self.expect(parts[1], "weight_scale_inv", count, torch.float32)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = kernels_for(parts, out)
        if kernels is not None:
            kernels.eight_bits(*parts, out, block_size=self.block_size)
            return
        for dense, quantized, scale in self._rows(out, *parts):
            dense.copy_(quantized.float() * self._spread(scale, dense.shape[1]))

    def join(self, weights: Sequence[Parts], shapes: Sequence[Shape], dim: int) -> Parts:
        is_whole = dim < len(shapes[0]) - 1 and (
            dim < len(shapes[0]) - 2 or all(shape[dim] % self.block_size == 0 for shape in shapes)
        )
        if not is_whole:
            raise ConfigError(
                f"fp8: weights of shape {tuple(shapes[0])} cannot be put together along dimension "
                f"{dim} in whole blocks of {self.block_size}; load them dequantized"
            )
        scales = [self._scales_shape(shape) for shape in shapes]
        return _joined(weights, shapes, scales, dim)

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
        self.expect(parts[0], "the weight", math.prod(shape), torch.int8)
        self.expect(parts[1], "the scale", math.prod(shape[:-1]), torch.float32)

    def dequantize_into(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = kernels_for(parts, out)
        if kernels is not None:
            kernels.eight_bits(*parts, out)
            return
        for dense, quantized, scale in self._rows(out, *parts):
            dense.copy_(quantized.float() * scale[:, None])

    def join(self, weights: Sequence[Parts], shapes: Sequence[Shape], dim: int) -> Parts:
        if dim == len(shapes[0]) - 1:
            raise ConfigError(
                f"int8: weights of shape {tuple(shapes[0])} cannot be put together along dimension "
                f"{dim}, which has one scale; load them dequantized"
            )
        return _joined(weights, shapes, [shape[:-1] for shape in shapes], dim)

    def _rows(
        self, dense: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        columns = dense.shape[-1]
        dense, values, scales = dense.view(-1, columns), values.view(-1, columns), scales.view(-1)
        for rows in pieces(len(dense), dense.device, width=columns):
            yield dense[rows], values[rows], scales[rows]


def _joined(
    weights: Sequence[Parts], shapes: Sequence[Shape], scales: Sequence[Shape], dim: int
) -> Parts:
    """Values and scales, seen in these shapes, each along the same dimension."""
    values = [
        parts[0].view(torch.uint8).view(tuple(shape))
        for parts, shape in zip(weights, shapes, strict=True)
    ]
    factors = [parts[1].view(tuple(shape)) for parts, shape in zip(weights, scales, strict=True)]
    return torch.cat(values, dim).view(weights[0][0].dtype), torch.cat(factors, dim)
