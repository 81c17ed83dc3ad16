"""Dense weights from quantized ones on a GPU, in one pass over memory.

torch's own operations take a dozen passes, in pieces for which scratch memory is needed. Each
function does to the bit what `dequantize_into` of its format in `quantized` does in plain torch.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # bytes of packed weights, or weights of a row
_TILE_ROWS, _TILE_COLUMNS = 64, 32
# A product and a sum are two roundings in torch, so they are two here.
_NO_FUSION = {"enable_fp_fusion": False}


@triton.jit
def _four_bits_of_a_table(
    packed, magnitudes, table, fractions, outer, offset, out, count,
    size: tl.constexpr, outer_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * block
    at = first + tl.arange(0, block)
    is_there = 2 * at < count
    codes = tl.load(packed + at, mask=is_there, other=0).to(tl.int32)
    group = 2 * at // size
    if outer_size > 0:
        index = tl.load(magnitudes + group, mask=is_there, other=0).to(tl.int32)
        largest = tl.load(outer + group // outer_size, mask=is_there, other=0.0)
        magnitude = tl.load(fractions + index) * largest + offset
    else:
        magnitude = tl.load(magnitudes + group, mask=is_there, other=0.0)
    high = tl.load(table + (codes >> 4)) * magnitude
    low = tl.load(table + (codes & 15)) * magnitude
    to = 2 * first + tl.arange(0, 2 * block)
    weights = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + to, weights, mask=to < count)


@triton.jit
def _four_bit_floats(
    blocks, scales, out, rows, columns,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """A tile of one expert, whose dense weight lies the other way round. A tile is as wide as a
    block of 32 weights, which share a power of two."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    is_there = row < rows
    source = (expert * rows + row) * (columns // 32) + tl.program_id(0)
    exponent = tl.load(scales + source, mask=is_there, other=127).to(tl.int32)
    # The float of that power, by its bits, because exp2 is not exact: 2 ** -127 is subnormal.
    power = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    lanes = tl.arange(0, tile_columns // 2)
    codes = tl.load(
        blocks + source[:, None] * 16 + lanes[None, :], mask=is_there[:, None], other=0
    ).to(tl.int32)
    codes = tl.interleave(codes & 15, codes >> 4)
    doubled = (codes >> 1) & 3
    bits = tl.where(
        doubled == 0, (codes & 1) * 0x3F000000, ((doubled + 126) << 23) | ((codes & 1) << 22)
    )
    numbers = (bits | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    weights = (numbers * power[:, None]).to(out.dtype.element_ty)
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    to = (expert * columns + column[:, None]) * rows + row[None, :]
    tl.store(out + to, tl.trans(weights), mask=is_there[None, :])


@triton.jit
def _eight_bits(
    values, scales, table, out, rows, columns,
    size: tl.constexpr, is_float: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Some weights of one row of a stack of matrices."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_there = column < columns
    values += row * columns
    if is_float:
        codes = tl.load(values + column, mask=is_there, other=0).to(tl.int32)
        numbers = tl.load(table + codes)
        across = (columns + size - 1) // size
        down = (rows + size - 1) // size
        scales += (row // rows * down + row % rows // size) * across
        scale = tl.load(scales + column // size, mask=is_there, other=0.0)
    else:
        numbers = tl.load(values + column, mask=is_there, other=0).to(tl.float32)
        scale = tl.load(scales + row)
    weights = (numbers * scale).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, weights, mask=is_there)


def four_bits_of_a_table(
    packed: Tensor,
    magnitudes: Tensor,
    table: Tensor,
    out: Tensor,
    *,
    block_size: int,
    nested: tuple[Tensor, Tensor, int, float] | None,
) -> None:
    """NF4. ``nested``: the table of magnitudes, the magnitudes of these, for how many each, and
    what is added."""
    fractions, outer, outer_size, offset = nested or (table, table, 0, 0.0)
    grid = (-(-packed.numel() // _BLOCK),)
    with torch.accelerator.device_index(out.device.index):  # because kernels start on this one
        _four_bits_of_a_table[grid](
            packed, magnitudes, table, fractions, outer, offset, out, out.numel(),
            size=block_size, outer_size=outer_size, block=_BLOCK, num_warps=8, **_NO_FUSION,
        )  # fmt: skip


def four_bit_floats(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """MXFP4: ``out`` is (experts, columns, rows)."""
    experts, columns, rows = out.shape
    grid = (columns // _TILE_COLUMNS, -(-rows // _TILE_ROWS), experts)
    with torch.accelerator.device_index(out.device.index):
        _four_bit_floats[grid](
            blocks, scales, out, rows, columns,
            tile_rows=_TILE_ROWS, tile_columns=_TILE_COLUMNS, num_warps=4,
        )  # fmt: skip


def eight_bits(values: Tensor, scales: Tensor, out: Tensor, *, block_size: int = 0) -> None:
    """Floats with a scale for each square of ``block_size``; with 0, integers with one for each
    row."""
    rows, columns = out.shape[-2:]
    is_float = block_size > 0
    grid = (out.numel() // columns, -(-columns // _BLOCK))
    table = _floats(out.device) if is_float else scales
    with torch.accelerator.device_index(out.device.index):
        _eight_bits[grid](
            values.view(torch.uint8) if is_float else values, scales, table, out, rows, columns,
            size=block_size, is_float=is_float, block=_BLOCK, num_warps=4,
        )  # fmt: skip


@functools.cache
def _floats(device: torch.device) -> Tensor:
    """All float8 (e4m3) as float32: cards before Ada have no instruction for them."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
