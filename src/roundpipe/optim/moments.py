"""How the moments of an optimizer lie in memory between steps: in fp32, in bf16, or in 8 bits with
a scale per block.

[Note: stochastic rounding] A running average moves by 0.1 % of the difference per step, which is
less than bf16 or 8 bits can tell apart: rounded to nearest, it would stand still. So values are
rounded up or down at random, with the probability that makes the expectation exact. The random
numbers are drawn from the step's number and the parameter's place, so that a run can be repeated
and resumed to the bit.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol

import torch

from ..kernels.updates import BLOCK
from ..memory import huge_pages
from ..memory.scratch import scratch

# Elements handled at a time, so that values in between stay in the cache; whole blocks.
PIECE = 1 << 18

_KEEP_UPPER_HALF = -(1 << 16)


class Noise:
    """Random numbers for rounding: a stretch of one long table, begun at a place drawn anew each
    time.

    Drawing each number would cost more than the update itself; each value sees another number at
    each step.
    """

    def __init__(self, seed: int) -> None:
        self._starts = random.Random(seed)

    def below_one(self, count: int) -> torch.Tensor:
        """At most ``PIECE`` numbers in [0, 1), fp32. Not to be written."""
        return _table_of_fractions()[self._place() :][:count]

    def halves(self, count: int) -> torch.Tensor:
        """At most ``PIECE`` numbers in [0, 2**16), int32. Not to be written."""
        return _table()[self._place() :][:count]

    def _place(self) -> int:
        return self._starts.randrange(PIECE)


@cache
def _table() -> torch.Tensor:
    return torch.randint(
        1 << 16, (2 * PIECE,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )


@cache
def _table_of_fractions() -> torch.Tensor:
    return _table().float() / (1 << 16)


def round_to_bf16(values: torch.Tensor, target: torch.Tensor, noise: Noise) -> None:
    """[Note: stochastic rounding]: fp32 to bf16 keeps the upper 16 bits, after a random number was
    added to the lower.

    ``values`` are overwritten. Infs stay.
    """
    words = values.view(torch.int32)
    words.add_(noise.halves(words.numel())).bitwise_and_(_KEEP_UPPER_HALF)
    target.copy_(values)


class Format(Protocol):
    """How one moment is stored. ``stored``: its tensors, flat, the same piece of each."""

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a moment of this shape begins with."""

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Its values in fp32, to be updated in place; scratch memory of that name, or the stored
        tensor itself."""

    def write(self, values: torch.Tensor, stored: Sequence[torch.Tensor], noise: Noise) -> None:
        """Stores what became of them; may overwrite ``values``."""


class Float32:
    """As it is: 4 bytes per value."""

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (huge_pages.zeros(like.shape, torch.float32),)

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        return stored[0]

    def write(self, values: torch.Tensor, stored: Sequence[torch.Tensor], noise: Noise) -> None:
        if values.data_ptr() != stored[0].data_ptr():
            stored[0].copy_(values)


class BFloat16:
    """2 bytes per value, rounded stochastically."""

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (huge_pages.zeros(like.shape, torch.bfloat16),)

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        return scratch(name, stored[0].numel()).copy_(stored[0])

    def write(self, values: torch.Tensor, stored: Sequence[torch.Tensor], noise: Noise) -> None:
        round_to_bf16(values, stored[0], noise)


class Blocks8:
    """1 byte per value and 4 per block of 256: ``(code / levels) ** power`` times the block's
    largest, and a sign.

    The power puts codes close together near zero, where most values of a block lie. ``least`` is
    the smallest code: where values are divided by, a small one must not become 0.
    """

    def __init__(self, *, dtype: torch.dtype, power: Literal[2, 4], least: int) -> None:
        self._dtype = dtype
        self._levels = torch.iinfo(dtype).max
        self._squares = {2: 1, 4: 2}[power]
        self._largest = float(self._levels**power)
        self._least = least

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return huge_pages.zeros(like.shape, self._dtype), torch.zeros(
            -(-like.numel() // BLOCK), dtype=torch.float32
        )

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        codes, scales = stored
        signed = scratch("signed", codes.numel()).copy_(codes)
        values = self._to_power(scratch(name, codes.numel()).copy_(signed))
        if self._dtype is torch.int8:
            values.copysign_(signed)
        for part, scale in _by_block(values, scales):
            part.mul_(scale / self._largest)
        return values

    def write(self, values: torch.Tensor, stored: Sequence[torch.Tensor], noise: Noise) -> None:
        """Values are brought to where codes are whole numbers to the power, and go to the one below
        or above."""
        codes, scales = stored
        count = values.numel()
        sizes = torch.abs(values, out=scratch("sizes", count))
        for part, scale in _by_block(sizes, scales):
            torch.amax(part, 1, keepdim=True, out=scale)
            # A block of zeros, or of values whose inverse is not finite, is stored as zeros.
            part.mul_(torch.nan_to_num(self._largest / scale, nan=torch.nan, posinf=0.0))
        lower = torch.sqrt(sizes, out=scratch("lower", count))
        for _ in range(self._squares - 1):
            lower.sqrt_()
        lower.floor_().clamp_(self._least, self._levels - 1)
        below = self._to_power(scratch("below", count).copy_(lower))
        step = self._to_power(torch.add(lower, 1, out=scratch("step", count))).sub_(below)
        torch.lt(step.mul_(noise.below_one(count)), sizes.sub_(below), out=below)
        lower.add_(below)
        codes.copy_(lower.copysign_(values) if self._dtype is torch.int8 else lower)

    def _to_power(self, codes: torch.Tensor) -> torch.Tensor:
        for _ in range(self._squares):
            codes.mul_(codes)
        return codes


def _by_block(
    values: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views: whole blocks as rows and their scales as a column, then the same of a shorter last
    block."""
    whole = values.numel() // BLOCK
    parts = [(values[: whole * BLOCK].view(-1, BLOCK), scales[:whole].view(-1, 1))]
    if values.numel() % BLOCK:
        parts.append((values[whole * BLOCK :].view(1, -1), scales[whole:].view(1, 1)))
    return parts
