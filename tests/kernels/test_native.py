"""The one-pass kernel against torch's kernels: the same bits, on any number of threads, or none at
all.

torch handles the last elements of an array one by one, without contracting products and sums, and
so may differ there by a rounding; arrays here are whole vectors.
"""

import logging
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe.kernels import native, updates
from roundpipe.kernels.updates import RuleUpdate, UpdateInto
from roundpipe.optim.optimizers import AdamRule, SGDRule

WIDTHS = [torch.float32, torch.bfloat16, torch.float16]
COUNT = 3 * 64 * 1024 + 4096  # several chunks, the last one short
ADAM: dict[str, Any] = {
    "step": 6.0,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
    "is_decoupled": True,
}
SGD: dict[str, Any] = {
    "lr": 0.01,
    "momentum": 0.9,
    "dampening": 0.1,
    "weight_decay": 0.1,
    "nesterov": False,
    "maximize": False,
    "is_first": False,
}
RULES = {
    "adamw": AdamRule(**ADAM),
    "adam": AdamRule(**ADAM | {"is_decoupled": False}),
    "amsgrad": AdamRule(**ADAM | {"amsgrad": True}),
    "maximize": AdamRule(**ADAM | {"maximize": True}),
    "low beta1": AdamRule(**ADAM | {"beta1": 0.3}),
    "sgd": SGDRule(**SGD),
    "nesterov": SGDRule(**SGD | {"nesterov": True, "dampening": 0}),
    "first": SGDRule(**SGD | {"is_first": True}),
    "no momentum": SGDRule(**SGD | {"momentum": 0.0}),
    "maximized sgd": SGDRule(**SGD | {"maximize": True}),
}


@pytest.fixture(autouse=True)
def needs_a_compiler() -> None:
    if native.library() is None:
        pytest.skip("this machine has no C compiler")


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


def make(rule: AdamRule | SGDRule, parts: int, offloaded: torch.dtype, scale: float) -> RuleUpdate:
    generator = torch.Generator().manual_seed(0)
    if isinstance(rule, AdamRule):
        num_moments = 3 if rule.amsgrad else 2
    else:
        num_moments = 1 if rule.momentum else 0
    return RuleUpdate(
        weight=torch.randn(COUNT, generator=generator),
        moments=tuple(torch.rand(COUNT, generator=generator) * 0.1 for _ in range(num_moments)),
        parts=tuple(torch.randn(COUNT, generator=generator).to(offloaded) for _ in range(parts)),
        scale=scale,
        seen=False,
        rule=rule,
    )


def by_kernel(update: RuleUpdate, working: torch.dtype) -> list[Tensor]:
    target = torch.zeros(COUNT, dtype=working)
    updates.compute([UpdateInto(update, target)])
    return [update.weight, *update.moments, target]


def by_torch(update: RuleUpdate, working: torch.dtype) -> list[Tensor]:
    """The gradient made whole in fp32, torch's fused kernel, a copy."""
    gradient = (
        sum((part.float() for part in update.parts[1:]), start=update.parts[0].float())
        * update.scale
    )
    update.rule.apply([update.weight], [gradient], [update.moments])
    return [update.weight, *update.moments, update.weight.to(working)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """To the bit where torch contracts products and sums, as the kernel does. Its code for any CPU
    (`ATEN_CPU_CAPABILITY=default`) does not, and rounds each of the few products by itself."""
    contracts = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    for one, other in zip(ours, theirs, strict=True):
        rtol, atol = 0.0, 0.0
        if not contracts and other.numel():
            rtol = torch.finfo(one.dtype).eps
            atol = 2 * torch.finfo(torch.float32).eps * float(other.float().abs().max())
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_gives_torchs_bits(rule: AdamRule | SGDRule) -> None:
    given = 2, torch.bfloat16, 0.37
    assert_equal(
        by_kernel(make(rule, *given), torch.bfloat16), by_torch(make(rule, *given), torch.bfloat16)
    )


@pytest.mark.parametrize("working", WIDTHS)
@pytest.mark.parametrize("offloaded", WIDTHS)
def test_every_pair_of_dtypes_gives_torchs_bits(
    offloaded: torch.dtype, working: torch.dtype
) -> None:
    given = RULES["adamw"], 1, offloaded, 1.0
    assert_equal(by_kernel(make(*given), working), by_torch(make(*given), working))


@pytest.mark.parametrize("working", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_and_written_as_torch_does(working: torch.dtype) -> None:
    """One step of SGD from 0 with lr -1 makes the weight the gradient. Half way between two it
    rounds to even."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(working)
    numbers = every.float()
    halfway = (numbers.view(torch.int32) + 0x8000).view(torch.float32)
    for gradient in (every, halfway, halfway.nextafter(torch.tensor(0.0))):
        weight, target = torch.zeros(1 << 16), torch.zeros(1 << 16, dtype=working)
        rule = SGDRule(**SGD | {"lr": -1.0, "momentum": 0.0, "weight_decay": 0.0})
        updates.compute([UpdateInto(RuleUpdate(weight, (), (gradient,), 1.0, False, rule), target)])
        torch.testing.assert_close(
            target, gradient.float().to(working), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("offloaded", WIDTHS)
@pytest.mark.parametrize("parts", [1, 3])
def test_squares_are_summed_precisely_and_alike_on_any_number_of_threads(
    parts: int, offloaded: torch.dtype, threads: Any
) -> None:
    given = make(RULES["sgd"], parts, offloaded, 1.0).parts
    for count in (0, 5, 64 * 1024, COUNT):
        some = [part[:count] for part in given]
        sums = set()
        for number in (1, 2, 5):
            threads(number)
            sums.add(updates.sum_of_squares(some))
        total = sum((part.float() for part in some[1:]), start=some[0].float())
        assert len(sums) == 1
        assert sums.pop() == pytest.approx(float(total.double().square().sum()), rel=1e-6)


def test_threads_change_nothing(threads: Any) -> None:
    """Many parameters at once, some smaller than a vector, some empty."""
    results = []
    for count in (1, 2, 5):
        threads(count)
        many = [make(RULES["adamw"], 1, torch.bfloat16, 0.5) for _ in range(3)]
        for index, size in enumerate((5, 0, 64 * 1024 + 1)):
            whole = many[index]
            many.insert(
                2 * index,
                RuleUpdate(
                    whole.weight[:size].clone(),
                    tuple(moment[:size].clone() for moment in whole.moments),
                    tuple(part[:size] for part in whole.parts),
                    0.5,
                    False,
                    whole.rule,
                ),
            )
        targets = [torch.zeros(update.weight.shape, dtype=torch.bfloat16) for update in many]
        updates.compute(
            [UpdateInto(update, target) for update, target in zip(many, targets, strict=True)]
        )
        results.append([*(update.weight for update in many), *targets])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


def test_memory_that_is_not_contiguous_takes_the_other_way() -> None:
    """A working copy may be a transposed view of the user's."""
    update, other = (
        make(RULES["adamw"], 1, torch.bfloat16, 1.0),
        make(RULES["adamw"], 1, torch.bfloat16, 1.0),
    )
    target = torch.zeros(2, COUNT // 2, dtype=torch.bfloat16).t()
    shaped = RuleUpdate(
        update.weight.view(target.shape),
        update.moments,
        update.parts,
        update.scale,
        update.seen,
        update.rule,
    )
    updates.compute([UpdateInto(shaped, target)])
    expected = by_torch(other, torch.bfloat16)
    torch.testing.assert_close(target, expected[-1].view(target.shape), rtol=0, atol=0)


@pytest.mark.parametrize("problem", ["no compiler", "it fails"])
def test_without_a_compiler_there_is_a_word_and_no_kernel(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_PREBUILT", tmp_path / "none")
    monkeypatch.setattr(
        native.shutil, "which", lambda name: str(failing) if problem == "it fails" else None
    )
    with caplog.at_level(logging.WARNING, "roundpipe"):
        assert native.library.__wrapped__() is None
    assert "update.c was not compiled" in caplog.text
    assert ("no such option" if problem == "it fails" else "no cc, gcc or clang") in caplog.text


def test_without_a_compiler_the_wheels_kernel_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a word, but not on a processor that lacks what it was compiled for."""
    brought = Path(shutil.copy(native._compiled(tmp_path), tmp_path / "brought.so"))
    monkeypatch.setattr(native, "_PREBUILT", brought)
    monkeypatch.setattr(native, "compiler_path", lambda: None)
    monkeypatch.setattr(native, "runs_prebuilt", lambda _: True)
    kernel = native.library.__wrapped__()
    assert kernel is not None
    assert native.is_prebuilt(kernel)
    assert caplog.text == ""
    monkeypatch.setattr(native, "runs_prebuilt", lambda _: False)
    assert native.library.__wrapped__() is None
    assert "no cc, gcc or clang" in caplog.text


@pytest.mark.parametrize(
    ("machine", "description", "runs"),
    [
        ("x86_64", "flags\t\t: fpu abm avx2 bmi1 bmi2 f16c fma movbe", True),
        ("x86_64", "flags\t\t: fpu abm bmi1 bmi2 f16c fma movbe", False),
        ("x86_64", "model name\t: avx 2", False),
        ("aarch64", "Features\t: fp asimd", True),
    ],
)
def test_what_processors_run_the_wheels_kernel(
    machine: str, description: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native.platform, "system", lambda: "Linux")
    assert native.runs_prebuilt(description) is runs


@pytest.mark.parametrize("number", range(len(native._SOURCES)))
def test_a_change_in_any_source_makes_another_kernel(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that changed alone left the old library in place."""
    folder = tmp_path / "sources"
    folder.mkdir()
    copies = [folder / source.name for source in native._SOURCES]
    for source, copied in zip(native._SOURCES, copies, strict=True):
        copied.write_text(source.read_text())
    monkeypatch.setattr(native, "_SOURCES", tuple(copies))
    monkeypatch.setattr(native, "_SOURCE", copies[0])
    before = native._compiled(tmp_path)
    copies[number].write_text(copies[number].read_text() + "\n")
    assert native._compiled(tmp_path) != before


def test_every_source_is_known_and_packaged() -> None:
    """Else a change of it, or an installed copy, would have another kernel or none."""
    folder = native._SOURCE.parent
    found = {file for file in folder.iterdir() if file.suffix in (".c", ".h")}
    assert found == set(native._SOURCES)
    packaged = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = packaged["tool"]["setuptools"]["package-data"]["roundpipe"]
    assert {f"kernels/*{file.suffix}" for file in found} <= set(patterns)


def test_a_kernel_is_compiled_once_per_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native._compiled(native.cache_folder() or tmp_path)
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert native._compiled(native.cache_folder() or tmp_path) == first
    assert first.parent == tmp_path / "roundpipe"
