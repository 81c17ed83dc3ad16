"""The one-pass kernel for state in fewer bits against the torch code of `optim.moments` and
`optim.lean`: the same bits, whatever the numbers, sizes, threads and chunks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe.kernels import chunks, native, updates
from roundpipe.kernels.updates import BLOCK, RuleUpdate, UpdateInto
from roundpipe.optim import moments
from roundpipe.optim.lean import FORMATS, LeanRule, MomentFormat
from roundpipe.optim.moments import Noise
from roundpipe.optim.optimizers import AdamRule

STEPS = 4
ADAM = AdamRule(
    step=3.0,
    lr=1e-2,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.1,
    amsgrad=False,
    maximize=False,
    is_decoupled=True,
)
STORED = pytest.mark.parametrize("stored", FORMATS, ids=["fp32", "bf16", "8bit"])
MASTERS = pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
Way = Callable[[RuleUpdate, Tensor | None], None]


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    if native.library() is None:
        pytest.skip("this machine has no C compiler")


def by_kernel(update: RuleUpdate, working: Tensor | None) -> None:
    assert updates._by_kernel([UpdateInto(update, working)])


def by_torch(update: RuleUpdate, working: Tensor | None) -> None:
    updates._in_chunks(update, working)


def keep_in(kept: list[UpdateInto]) -> Way:
    return lambda update, working: kept.append(UpdateInto(update, working))


def gradients_like_real_ones(count: int, seed: int) -> Tensor:
    """Over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(count, generator=generator) - 6)
    return torch.randn(count, generator=generator) * sizes


def trained(
    way: Way,
    gradients: Sequence[Sequence[Tensor]],
    stored: MomentFormat,
    master: torch.dtype,
    *,
    adam: AdamRule = ADAM,
    scale: float = 1.0,
    working: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """Everything after a step for each of ``gradients``, which are the parts of one."""
    count = gradients[0][0].numel()
    weight = torch.randn(count, generator=torch.Generator().manual_seed(99)).to(master)
    formats = FORMATS[stored]
    state = tuple(tensor for form in formats for tensor in form.zeros(weight))
    target = torch.zeros(count, dtype=working)
    for step, parts in enumerate(gradients, start=1):
        rule = LeanRule(replace(adam, step=float(step)), formats, Noise(step))
        way(RuleUpdate(weight, state, tuple(parts), scale, False, rule), target)
    return [weight, *state, target]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@STORED
@MASTERS
@pytest.mark.parametrize(
    "count", [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 31, 16 * 1024 + 513]
)
def test_every_size_has_the_torch_codes_bits(
    count: int, master: torch.dtype, stored: MomentFormat
) -> None:
    given = [[gradients_like_real_ones(count, step).bfloat16()] for step in range(STEPS)]
    ours = trained(by_kernel, given, stored, master)
    assert_same(ours, trained(by_torch, given, stored, master))
    assert count < BLOCK or (ours[0] != ours[0][0]).any()


@STORED
@MASTERS
@pytest.mark.parametrize(
    "changed",
    [
        {"maximize": True},
        {"weight_decay": 0.0},
        {"beta1": 0.0},
        {"beta1": 0.3, "beta2": 0.5},
        {"eps": 1e-3, "lr": 1.0},
    ],
    ids=str,
)
def test_every_setting_has_the_torch_codes_bits(
    changed: dict[str, Any], master: torch.dtype, stored: MomentFormat
) -> None:
    given = [
        [gradients_like_real_ones(3001, 2 * step + part) for part in range(2)]
        for step in range(STEPS)
    ]
    settings: dict[str, Any] = {"adam": replace(ADAM, **changed), "scale": 0.37}
    ours = trained(by_kernel, given, stored, master, **settings)
    assert_same(ours, trained(by_torch, given, stored, master, **settings))


@MASTERS
@pytest.mark.parametrize("working", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offloaded", [torch.float32, torch.bfloat16, torch.float16])
def test_every_pair_of_dtypes_has_the_torch_codes_bits(
    offloaded: torch.dtype, working: torch.dtype, master: torch.dtype
) -> None:
    given = [[gradients_like_real_ones(3001, step).to(offloaded)] for step in range(2)]
    ours = trained(by_kernel, given, "8bit", master, working=working)
    assert_same(ours, trained(by_torch, given, "8bit", master, working=working))


TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
ODD = {
    "zeros": [0.0, -0.0],
    "denormals": [TINY / 2, -TINY / 1024, 1e-45],
    "squares that are denormal": [1e-20, -1e-21, 3e-22],
    "squares whose inverse overflows": [1e-18, -2e-19],
    "squares that overflow": [1e20, -3e30, 1.0],
    "huge": [HUGE, -HUGE],
    "one in a block of zeros": [0.0] * 300 + [1.0],
    "an inf": [1.0] * 300 + [float("inf")],
    "a negative inf": [0.0] * 300 + [-float("inf")],
    "a NaN": [-1.0] * 300 + [float("nan")],
    "a NaN with all bits": [1.0] * 300 + [torch.tensor(-1).int().view(torch.float32).item()],
}


@STORED
@MASTERS
@pytest.mark.parametrize("name", ODD)
def test_odd_numbers_have_the_torch_codes_bits(
    name: str, master: torch.dtype, stored: MomentFormat
) -> None:
    """Among ordinary steps, because what they leave behind counts as well."""
    pattern = torch.tensor(ODD[name])
    odd = pattern.repeat(-(-2000 // pattern.numel()))[:2000]
    ordinary = gradients_like_real_ones(2000, 0)
    given = [[ordinary], [odd], [odd], [ordinary]]
    ours = trained(by_kernel, given, stored, master)
    theirs = trained(by_torch, given, stored, master)
    has_scales = stored == "8bit"
    if has_scales and not all(tensor.isfinite().all() for tensor in (ours[2], ours[4])):
        # Codes of blocks whose scale is not finite say nothing.
        for number, form in ((1, FORMATS[stored][0]), (3, FORMATS[stored][1])):
            for result in (ours, theirs):
                values = form.read(result[number : number + 2], "test").clone()
                result[number] = torch.where(values.isfinite(), result[number], 0)
    assert_same(ours, theirs)


@STORED
def test_what_is_not_finite_harms_its_own_block_only(stored: MomentFormat) -> None:
    """And stays where it is if there are no blocks."""
    gradient = torch.ones(4 * BLOCK)
    gradient[BLOCK + 5] = torch.nan
    gradient[2 * BLOCK + 7] = torch.inf
    for way in (by_kernel, by_torch):
        weight, *_ = trained(way, [[gradient], [torch.ones(4 * BLOCK)]], stored, torch.float32)
        harmed = {int(index) // BLOCK for index in (~weight.isfinite()).nonzero()}
        assert harmed == {1, 2}
        assert stored == "8bit" or (~weight.isfinite()).sum() == 2


@STORED
@MASTERS
def test_threads_chunks_and_neighbours_change_nothing(
    master: torch.dtype, stored: MomentFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parameters in one call of the kernel, and the torch code in pieces and chunks of
    other sizes."""
    counts = [70_000, 5, 0, 3 * BLOCK + 1, 200_000]
    given = [[[gradients_like_real_ones(count, 7).bfloat16()]] for count in counts]
    alone = [trained(by_kernel, each, stored, master) for each in given]
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        kept: list[UpdateInto] = []
        together = [trained(keep_in(kept), each, stored, master) for each in given]
        assert updates._by_kernel(kept)
        for one, other in zip(together, alone, strict=True):
            assert_same(one, other)
    for piece, chunk in ((BLOCK, 16 * BLOCK), (8 * BLOCK, 2 * BLOCK)):
        monkeypatch.setattr(moments, "PIECE", piece)
        monkeypatch.setattr("roundpipe.optim.lean.PIECE", piece)
        monkeypatch.setattr(chunks, "_CHUNK", chunk)
        assert_same(trained(by_torch, given[0], stored, master), alone[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda update: update._replace(weight=update.weight.half()),
        lambda update: update._replace(moments=update.moments[:1] + update.moments[2:]),
        lambda update: update._replace(
            moments=(update.moments[0].to(torch.bfloat16), *update.moments[1:])
        ),
        lambda update: update._replace(moments=(update.moments[0][1:], *update.moments[1:])),
        lambda update: update._replace(moments=(*update.moments[:3], update.moments[3][:1])),
    ],
    ids=["fp16 masters", "no scales", "another format", "fewer codes", "no scale for each block"],
)
def test_the_kernel_refuses_what_the_rule_does_not_store(
    change: Callable[[RuleUpdate], RuleUpdate],
) -> None:
    """It would read the memory as something else."""
    kept: list[UpdateInto] = []
    trained(keep_in(kept), [[torch.ones(BLOCK + 5)]], "8bit", torch.float32)
    assert not updates._by_kernel([UpdateInto(change(kept[0].update), None)])


def test_random_numbers_are_even_and_independent() -> None:
    """Of one element over steps, of neighbours, of the two moments and the master, and of
    parameters beside each other: every 1024th of the range comes as often as chance says, and no
    two series go together."""
    count, steps = 1 << 16, 64
    drawn = []
    for step in range(steps):
        noise, beside = Noise(step << 32 | 3), Noise(step << 32 | 4)
        moments_of_one = torch.stack(noise.for_moments(0, count))
        others = [noise.for_master(0, count).clone(), beside.for_moments(0, count)[0]]
        drawn.append(torch.stack([*moments_of_one, *others]))
    series = torch.stack(drawn, dim=1).double() / (1 << 16) - 0.5
    for numbers in series:
        assert -0.5 <= numbers.min() <= numbers.max() < 0.5
        found = torch.histc(numbers, 1024, -0.5, 0.5)
        expected = numbers.numel() / 1024
        assert (found - expected).abs().max() < 5 * expected**0.5
        of_one = numbers.mean(0) * (12 * steps) ** 0.5
        assert abs(float(of_one.square().mean()) - 1) < 5 * (2 / count) ** 0.5
    pairs = [(a, b) for number, a in enumerate(series) for b in series[:number]]
    pairs += [(a[:, shift:], a[:, :-shift]) for a in series for shift in (1, 2, 8, 64, 256, 512)]
    pairs += [(a[shift:], a[:-shift]) for a in series for shift in (1, 2, 8)]
    for one, other_one in pairs:
        together = float((one * other_one).mean()) * 12 * one.numel() ** 0.5
        assert abs(together) < 5


def test_any_stretch_of_random_numbers_is_part_of_the_whole() -> None:
    whole = torch.stack(Noise(5).for_moments(0, 5000))
    part = torch.stack(Noise(5).for_moments(1234, 100))
    assert torch.equal(whole[:, 1234:1334], part)
