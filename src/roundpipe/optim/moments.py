"""How the moments of an optimizer lie in memory between steps: in fp32, in bf16, or in 8 bits with
a scale per block.

[Note: stochastic rounding] A running average moves by 0.1 % of the difference per step, which is
less than bf16 or 8 bits can tell apart: rounded to nearest, it would stand still. So values are
rounded up or down at random, with the probability that makes the expectation exact. The random
numbers are a hash of the step's number, the parameter's place and the element's place in it, so
that a run can be repeated and resumed to the bit, whatever pieces are updated in whichever order.

What is here is the reference of `kernels/lean.h`, which computes the same bits in one pass.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal, Protocol

import torch

from ..kernels.updates import BLOCK
from ..memory import huge_pages
from ..memory.scratch import CPU, scratch
from ..memory.state_file import Memory

# Elements handled at a time, so that values in between stay in the cache; whole blocks.
PIECE = 1 << 18

_KEEP_UPPER_HALF = -(1 << 16)
_LOWER_HALF = (1 << 16) - 1
_WORD = (1 << 32) - 1
_STRIDE = 0x9E3779B9


class Noise:
    """Random numbers for rounding: 32 bits for each element of a parameter in a step, for its two
    moments, and another 32 for the master.

    Drawing them from a generator would cost more than the update itself, and make them depend on
    who has drawn before.
    """

    def __init__(self, seed: int) -> None:
        first, second = _mixed(seed), _mixed(seed + (1 << 63))
        self.keys = first & _WORD, first >> 32, second & _WORD, second >> 32

    def for_moments(
        self, start: int, count: int, device: torch.device = CPU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers in [0, 2**16), int32, for at most ``PIECE`` elements from ``start`` on: for the
        first moment and the second. Valid until the next are asked for."""
        words = _hashed(start, count, device, *self.keys[:2])
        second = _upper_half_of(words, scratch("second", count, torch.int32, device))
        return words.bitwise_and_(_LOWER_HALF), second

    def for_master(self, start: int, count: int, device: torch.device = CPU) -> torch.Tensor:
        """The same for the master."""
        return _hashed(start, count, device, *self.keys[2:]).bitwise_and_(_LOWER_HALF)


def _mixed(seed: int) -> int:
    """64 bits of which each depends on every bit of the seed (a step of splitmix64)."""
    word = (seed + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & ((1 << 64) - 1)
    return word ^ (word >> 31)


def _hashed(start: int, count: int, device: torch.device, key: int, other: int) -> torch.Tensor:
    """As ``random_bits`` in lean.h. Sums and products wrap around."""
    words, shifted = (scratch(name, count, torch.int32, device) for name in ("words", "shifted"))
    torch.add(_counters(device)[:count], _signed(key + start * _STRIDE), out=words)
    words.bitwise_xor_(_upper_half_of(words, shifted)).mul_(_signed(0x7FEB352D))
    words.bitwise_xor_(_signed(other))
    torch.bitwise_right_shift(words, 15, out=shifted).bitwise_and_(0x1FFFF)
    words.bitwise_xor_(shifted).mul_(_signed(0x846CA68B))
    return words.bitwise_xor_(_upper_half_of(words, shifted))


@cache
def _counters(device: torch.device) -> torch.Tensor:
    return (torch.arange(PIECE, device=device) * _STRIDE).to(torch.int32)  # the lower half


def _upper_half_of(words: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A shift to the right brings copies of the sign, which are taken away."""
    return torch.bitwise_right_shift(words, 16, out=out).bitwise_and_(_LOWER_HALF)


def _signed(word: int) -> int:
    """A word as int32 has it."""
    word &= _WORD
    return word - (word >> 31 << 32)


def round_to_bf16(values: torch.Tensor, target: torch.Tensor, halves: torch.Tensor) -> None:
    """[Note: stochastic rounding]: fp32 to bf16 keeps the upper 16 bits, after a random number was
    added to the lower.

    ``values`` are overwritten. Infs stay, and so do NaNs.
    """
    is_nan = values.isnan()
    words = values.view(torch.int32)
    words.add_(halves).bitwise_and_(_KEEP_UPPER_HALF)
    target.copy_(values.masked_fill_(is_nan, torch.nan))


class Format(Protocol):
    """How one moment is stored. ``stored``: its tensors, flat, the same piece of each."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the tensors that hold it."""

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a moment of this shape begins with, beside a master if it is one's."""

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Its values in fp32, to be updated in place; scratch memory of that name, or the stored
        tensor itself."""

    def write(
        self, values: torch.Tensor, stored: Sequence[torch.Tensor], halves: torch.Tensor
    ) -> None:
        """Stores what became of them, rounded by these numbers in [0, 2**16); may overwrite
        ``values``."""


def _memory(like: torch.Tensor) -> Memory:
    memory: Memory = getattr(like, "memory", huge_pages)
    return memory


class Float32:
    """As it is: 4 bytes per value."""

    dtypes = (torch.float32,)

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_memory(like).zeros(like.shape, torch.float32),)

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        return stored[0]

    def write(
        self, values: torch.Tensor, stored: Sequence[torch.Tensor], halves: torch.Tensor
    ) -> None:
        if values.data_ptr() != stored[0].data_ptr():
            stored[0].copy_(values)


class BFloat16:
    """2 bytes per value, rounded stochastically."""

    dtypes = (torch.bfloat16,)

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_memory(like).zeros(like.shape, torch.bfloat16),)

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        return scratch(name, stored[0].numel(), device=stored[0].device).copy_(stored[0])

    def write(
        self, values: torch.Tensor, stored: Sequence[torch.Tensor], halves: torch.Tensor
    ) -> None:
        round_to_bf16(values, stored[0], halves)


class Blocks8:
    """1 byte per value and 4 per block of 256: ``(code / levels) ** power`` times the block's
    largest, and a sign.

    The power puts codes close together near zero, where most values of a block lie. ``least`` is
    the smallest code: where values are divided by, a small one must not become 0.
    """

    def __init__(self, *, dtype: torch.dtype, power: Literal[2, 4], least: int) -> None:
        self.dtypes = dtype, torch.float32
        self._levels = torch.iinfo(dtype).max
        self._squares = {2: 1, 4: 2}[power]
        self._largest = float(self._levels**power)
        self._least = least

    def zeros(self, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        memory, blocks = _memory(like), [-(-like.numel() // BLOCK)]
        return memory.zeros(like.shape, self.dtypes[0]), memory.zeros(blocks, torch.float32)

    def read(self, stored: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        codes, scales = stored
        signed = scratch("signed", codes.numel(), device=codes.device).copy_(codes)
        values = self._to_power(scratch(name, codes.numel(), device=codes.device).copy_(signed))
        if self.dtypes[0] is torch.int8:
            values.copysign_(signed)
        for part, scale in _by_block(values, scales):
            part.mul_(scale * (1 / self._largest))
        return values

    def write(
        self, values: torch.Tensor, stored: Sequence[torch.Tensor], halves: torch.Tensor
    ) -> None:
        """Values are brought to where codes are whole numbers to the power, and go to the one below
        or above."""
        codes, scales = stored
        count, device = values.numel(), values.device
        sizes = torch.abs(values, out=scratch("sizes", count, device=device))
        # Of fourth powers the first root is taken before they are scaled, because the update has
        # taken it.
        lower = scratch("lower", count, device=device).copy_(sizes)
        if self._squares == 2:
            root_(lower)
        for (size, scale), (root, _) in zip(
            _by_block(sizes, scales), _by_block(lower, scales), strict=True
        ):
            torch.amax(size, 1, keepdim=True, out=scale)
            units = scale.reciprocal() * self._largest
            # A block of zeros, or of values whose inverse is not finite, is stored as zeros.
            units.masked_fill_(units.isposinf(), 0.0)
            size.mul_(units)
            root.mul_(units if self._squares == 1 else root_(units))
        root_(lower).floor_().nan_to_num_(self._least).clamp_(self._least, self._levels - 1)
        below = self._to_power(scratch("below", count, device=device).copy_(lower))
        step = torch.add(lower, 1, out=scratch("step", count, device=device))
        chance = scratch("chance", count, device=device).copy_(halves).mul_(1 / (1 << 16))
        step = self._to_power(step).sub_(below).mul_(chance)
        torch.lt(step, sizes.sub_(below), out=below)
        lower.add_(below)
        codes.copy_(lower.copysign_(values) if self.dtypes[0] is torch.int8 else lower)

    def _to_power(self, codes: torch.Tensor) -> torch.Tensor:
        for _ in range(self._squares):
            codes.mul_(codes)
        return codes


def root_(values: torch.Tensor) -> torch.Tensor:
    """Square roots in place, rounded to nearest: torch's own in fp32 are not on every machine."""
    wide = scratch("root", values.numel(), torch.float64, values.device).view(values.shape)
    return values.copy_(wide.copy_(values).sqrt_())


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
