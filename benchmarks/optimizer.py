"""The CPU update beside what it could be: AdamW, bf16 gradient -> fp32 master and moments -> bf16
working copy.

    python benchmarks/optimizer.py --threads 2 --millions 40
    python benchmarks/optimizer.py --threads 4,8,11,12,14,16 --millions 200

Prints G parameters/s and GB/s for each number of threads: the fastest of several passes over the
whole. An fp32 pass moves 28 bytes per parameter (2 + 12 read, 12 + 2 written); LeanAdamW's, with
moments and masters in fewer bits, fewer. Needs 46 bytes per parameter. `copy` and `triad` are the
memory's own speed.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import measure
import torch

from roundpipe.kernels import native, updates
from roundpipe.kernels.updates import RuleUpdate, UpdateInto, sum_of_squares
from roundpipe.memory import huge_pages
from roundpipe.optim.lean import FORMATS, LeanRule, MomentFormat
from roundpipe.optim.moments import Noise
from roundpipe.optim.optimizers import AdamRule

BYTES = 28
RULE = AdamRule(
    step=2.0,
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    amsgrad=False,
    maximize=False,
    is_decoupled=True,
)
LEAN: list[tuple[str, MomentFormat, torch.dtype, int]] = [
    ("one pass, bf16 moments", torch.bfloat16, torch.float32, 20),
    ("one pass, 8-bit moments", "8bit", torch.float32, 16),
    ("one pass, bf16 masters", torch.float32, torch.bfloat16, 24),
    ("one pass, bf16 masters and moments", torch.bfloat16, torch.bfloat16, 16),
    ("one pass, bf16 masters, 8-bit moments", "8bit", torch.bfloat16, 12),
]
MATRIX = 4_000_000  # parameters of one of the matrices that a layer's update is made of
PER_LAYER = 8


class Arrays(NamedTuple):
    """Everything of some parameters, and room for their gradient in fp32."""

    weight: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    gradient: torch.Tensor
    working: torch.Tensor
    wide: torch.Tensor

    def part(self, start: int, stop: int) -> "Arrays":
        return Arrays(*(array[start:stop] for array in self))

    def matrices(self) -> Iterator["Arrays"]:
        for start in range(0, self.weight.numel(), MATRIX):
            yield self.part(start, start + MATRIX)

    def layers(self) -> Iterator[list["Arrays"]]:
        matrices = list(self.matrices())
        for start in range(0, len(matrices), PER_LAYER):
            yield matrices[start : start + PER_LAYER]


def make(count: int) -> Arrays:
    weight, mean, square = (
        huge_pages.empty((count,), torch.float32) for _ in range(3)
    )  # as masters and moments lie
    weight.normal_()
    return Arrays(
        weight,
        mean.normal_(std=0.01),
        square.uniform_(0, 0.01),
        (torch.randn(count) * 0.01).bfloat16(),
        weight.bfloat16(),
        torch.zeros(count),
    )


def fused(arrays: Arrays) -> None:
    RULE.apply([arrays.weight], [arrays.wide], [[arrays.mean, arrays.square]])


def three_passes(arrays: Arrays) -> None:
    """What there is without RoundPipe, memory allocated beforehand."""
    arrays.wide.copy_(arrays.gradient)
    fused(arrays)
    arrays.working.copy_(arrays.weight)


def update_of(arrays: Arrays) -> RuleUpdate:
    return RuleUpdate(
        arrays.weight, (arrays.mean, arrays.square), (arrays.gradient,), 0.9, False, RULE
    )


def one_pass(arrays: Arrays) -> None:
    """As the optimizer thread does it: layer by layer."""
    for matrices in arrays.layers():
        updates.compute([UpdateInto(update_of(each), each.working) for each in matrices])


Lean = list[list[UpdateInto]]


def lean_state(arrays: Arrays, moments: MomentFormat, dtype: torch.dtype) -> Lean:
    """Updates of the same parameters, layer by layer, by `LeanAdamW`'s rule. fp32 masters are the
    arrays' own."""
    updates_of_all = list[UpdateInto]()
    for each in arrays.matrices():
        weight = each.weight
        if dtype is not torch.float32:
            weight = huge_pages.empty(weight.shape, dtype).copy_(weight)
        formats = FORMATS[moments]
        state = tuple(tensor for form in formats for tensor in form.zeros(weight))
        rule = LeanRule(RULE, formats, Noise(len(updates_of_all)))
        update = RuleUpdate(weight, state, (each.gradient,), 0.9, False, rule)
        updates_of_all.append(UpdateInto(update, each.working))
    return [
        updates_of_all[start : start + PER_LAYER]
        for start in range(0, len(updates_of_all), PER_LAYER)
    ]


def lean_pass(layers: Lean, _: Arrays) -> None:
    for layer in layers:
        updates.compute(layer)


def two_passes(arrays: Arrays) -> None:
    """As for asynchronous steps without memory for a second working copy: writing back is a pass of
    its own."""
    for matrices in arrays.layers():
        updates.compute([UpdateInto(update_of(each), None) for each in matrices])
    for each in arrays.matrices():
        each.working.copy_(each.weight)


def in_chunks(arrays: Arrays) -> None:
    """Without a compiler."""
    for each in arrays.matrices():
        updates._in_chunks(update_of(each), each.working)


def norm(arrays: Arrays) -> None:
    for each in arrays.matrices():
        sum_of_squares([each.gradient])


def load_triad(folder: Path) -> Callable[[Arrays], None]:
    source, made = Path(__file__).with_name("triad.c"), folder / "triad.so"
    subprocess.run(["cc", *native._FLAGS, "-pthread", str(source), "-o", str(made)], check=True)
    kernel = ctypes.CDLL(str(made)).triad

    def triad(arrays: Arrays) -> None:
        addresses = (ctypes.c_void_p(array.data_ptr()) for array in arrays[:5])
        kernel(
            *addresses,
            ctypes.c_int64(arrays.weight.numel()),
            ctypes.c_int64(torch.get_num_threads()),
        )

    return triad


def fastest(
    rows: dict[str, tuple[Callable[[Arrays], None], int]],
    arrays: Arrays,
    rounds: int,
    limit_s: float,
) -> dict[str, float]:
    """Seconds of each row's fastest pass. All rows in turn, so that what else the machine does
    strikes them alike.

    The first round does not count, and says what it took: with more threads than there are free
    cores some rows take hundreds of times longer. No round begins after ``limit_s``, but for one
    that counts.
    """
    best = dict.fromkeys(rows, float("inf"))
    began = time.perf_counter()
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() - began > limit_s:
            break
        for name, (work, _) in rows.items():
            start = time.perf_counter()
            work(arrays)
            taken = time.perf_counter() - start
            if number:
                best[name] = min(best[name], taken)
            else:
                print(f"  {name}: {taken:.2f} s at first", file=sys.stderr, flush=True)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", default=str(os.cpu_count()), help="one number, or several with commas"
    )
    parser.add_argument("--millions", type=int, default=100, help="of parameters")
    parser.add_argument(
        "--limit-s", type=float, default=20.0, help="for each number of threads (default 20)"
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="of which each line's fastest pass is shown"
    )
    settings = parser.parse_args()
    if native.library() is None:
        raise SystemExit("the one-pass kernel was not compiled: is there a C compiler?")
    count = settings.millions * 1_000_000
    arrays = make(count)
    with tempfile.TemporaryDirectory() as folder:
        rows: dict[str, tuple[Callable[[Arrays], None], int]] = {
            "copy fp32 -> fp32": (lambda a: a.wide.copy_(a.weight), 8),
            "triad of the same mix": (load_triad(Path(folder)), BYTES),
            "torch: cast, fused AdamW, cast": (three_passes, BYTES),
            "torch: fused AdamW alone": (fused, BYTES),
            "torch's kernels in chunks": (in_chunks, BYTES),
            "update, then writing back": (two_passes, BYTES),
            "one pass": (one_pass, BYTES),
            "gradient norm": (norm, 2),
        }
        for name, moments, dtype, num_bytes in LEAN:
            rows[name] = partial(lean_pass, lean_state(arrays, moments, dtype)), num_bytes
        for threads in map(int, settings.threads.split(",")):
            torch.set_num_threads(threads)
            print(f"\n{threads} threads, {settings.millions} M parameters")
            seconds = fastest(rows, arrays, settings.rounds, settings.limit_s)
            rates = {name: count / taken / 1e9 for name, taken in seconds.items()}
            for name, (_, num_bytes) in rows.items():
                bandwidth = rates[name] * num_bytes
                print(
                    f"  {name:38} {rates[name]:6.2f} G parameters/s  {bandwidth:7.1f} GB/s",
                    flush=True,
                )
                measure.emit(
                    {
                        "bench": "optimizer", "what": name, "value": rates[name],
                        "unit": "G params/s",
                        "setting": f"{bandwidth:.0f} GB/s, {threads} threads, "
                        f"{settings.millions} M params",
                        "workload": "full size", **measure.environment(),
                    }
                )  # fmt: skip
            ours = rates["one pass"]
            print(
                f"  one pass: {ours / rates['torch: cast, fused AdamW, cast']:.2f} x torch's three "
                "passes, ",
                end="",
            )
            print(f"{ours / rates['triad of the same mix']:.0%} of the triad")


if __name__ == "__main__":
    main()
