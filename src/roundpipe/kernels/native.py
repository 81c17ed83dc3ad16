"""The one-pass kernel ``update.c``: compiled once per machine with the system's compiler, called
through ctypes.

ctypes lets go of the interpreter for the whole call, so the threads that feed the devices go on.
Without a compiler ``library()`` is None and updates run on torch's kernels, chunk by chunk.
"""

import ctypes
import functools
import hashlib
import logging
import operator
import os
import platform
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

_log = logging.getLogger("roundpipe")
_SOURCE = Path(__file__).with_name("update.c")
# No contraction and no reassociation, because results are to be the same on every machine.
_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
# As in update.c:
_FLOAT32 = 1
_DTYPES = {torch.float32: _FLOAT32, torch.bfloat16: 2, torch.float16: 3}
_ARRAY_BYTES = 16
_JOB_WORDS = 8
_NUM_COEFFICIENTS = 7
_SQUARES = 4
_CHUNK = 16 * 1024

_dtype_of = operator.attrgetter("dtype")
_is_on_cpu = operator.attrgetter("is_cpu")


class Formula(NamedTuple):
    """A rule of ``update.c``: its number there and what it multiplies by."""

    rule: int
    coefficients: tuple[float, ...]
    sign: float = 1.0  # of the gradient
    coupled_decay: float = 0.0
    decay: float = 1.0


Tensors = tuple[torch.Tensor, ...]
Job = tuple[Formula, float, Tensors, Tensors, torch.Tensor | None]
"""One parameter's update, which is a plain tuple because there are hundreds in a step: the formula,
the factor of the gradient, what is updated (weight first), what adds up to the gradient, and the
working copy to be written, if any."""


class _Formula(ctypes.Structure):
    _fields_ = (
        ("rule", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("coupled_decay", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("coefficients", ctypes.c_float * _NUM_COEFFICIENTS),
    )


def update(kernel: ctypes.CDLL, jobs: Sequence[Job]) -> bool:
    """Runs the jobs on as many threads as torch would use here. Blocks; the interpreter is free
    meanwhile.

    What is done here for each parameter keeps the threads waiting that feed the devices, so it is
    little.

    Returns:
        False, with nothing done, if there is a tensor that the kernel cannot use. What is updated
        must be fp32, the others any of three dtypes, all contiguous and on the CPU.
    """
    rows: list[int] = []
    written: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    described: dict[tuple[int, float], _Formula] = {}
    for formula, scale, own, parts, working in jobs:
        key = id(formula), scale
        if key not in described:
            described[key] = _described(formula, scale)
        is_written_back = working is not None
        rows += (
            ctypes.addressof(described[key]),
            len(own),
            len(parts),
            is_written_back,
            own[0].numel(),
            0,
            0,
            0,
        )
        written += own
        others += parts
        if working is not None:
            others.append(working)
    dtypes = list(map(_DTYPES.get, map(_dtype_of, others)))
    if not (
        set(map(_dtype_of, written)) <= {torch.float32}
        and None not in dtypes
        and _are_plain(written + others)
    ):
        return False
    _run(kernel, rows, written, others, dtypes)
    return True


def sum_of_squares(kernel: ctypes.CDLL, parts: Sequence[torch.Tensor]) -> float:
    """Of the sum of ``parts``, in fp32 within a block and in double over blocks. The same for any
    number of threads."""
    count = parts[0].numel()
    squares = torch.zeros(count // _CHUNK + 1, dtype=torch.float64)
    described = _Formula(rule=_SQUARES)
    row = ctypes.addressof(described), 1, len(parts), False, count, 0, 0, 0
    _run(kernel, row, [squares], parts, [_DTYPES[part.dtype] for part in parts])
    return float(squares.sum())


def can_read(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel reads such gradients."""
    return all(part.dtype in _DTYPES for part in parts) and _are_plain(parts)


def _run(
    kernel: ctypes.CDLL,
    rows: Sequence[int],
    written: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    dtypes: Sequence[Any],
) -> None:
    """``rows``: the jobs as in update.c. Each takes the next of ``written`` and ``others``, as many
    as it says."""
    jobs = array("q", rows)
    addresses = array("q", map(torch.Tensor.data_ptr, written))
    arrays = array("q", bytes(_ARRAY_BYTES * len(others)))
    arrays[0::2] = array("q", map(torch.Tensor.data_ptr, others))
    arrays[1::2] = array("q", dtypes)
    tables = (table.buffer_info()[0] for table in (jobs, addresses, arrays))
    kernel.roundpipe_update(*tables, len(rows) // _JOB_WORDS, torch.get_num_threads())


def _described(formula: Formula, scale: float) -> _Formula:
    return _Formula(
        rule=formula.rule,
        scale=formula.sign * scale,
        coupled_decay=formula.coupled_decay,
        decay=formula.decay,
        coefficients=(ctypes.c_float * _NUM_COEFFICIENTS)(*formula.coefficients),
    )


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(_is_on_cpu, tensors)) and all(map(torch.Tensor.is_contiguous, tensors))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None, said once, if this machine cannot make it."""
    try:
        kernel = ctypes.CDLL(str(_compiled(_cache_folder())))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning(
            "optimizers run on torch's kernels, which are slower: update.c was not compiled (%s)",
            reason,
        )
        return None
    kernel.roundpipe_update.argtypes = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 2)
    kernel.roundpipe_update.restype = None
    return kernel


def _compiled(folder: Path) -> Path:
    """Its path in ``folder``. Processes that compile at the same time each put a whole file in
    place."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise FileNotFoundError("no cc, gcc or clang on the path")
    identity = "\n".join((_SOURCE.read_text(), *_FLAGS, compiler, _processor()))
    target = folder / f"update-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as building:
            made = Path(building) / "update.so"
            command = [compiler, *_FLAGS, "-pthread", str(_SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            made.replace(target)
    return target


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roundpipe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(
        tempfile.mkdtemp(prefix="roundpipe-")
    )  # a home that cannot be written to: compiled in every process


def _processor() -> str:
    """What -march=native depends on: a home may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        )
    except OSError:
        return platform.processor() + platform.machine()
