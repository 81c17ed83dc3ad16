"""The one-pass kernel ``update.c``: compiled once per machine with the system's compiler, called through ctypes.

ctypes lets go of the interpreter for the whole call, so the threads that feed the devices go on. Without a compiler
``library()`` is None and updates run on torch's kernels, chunk by chunk.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_log = logging.getLogger("roundpipe")
_SOURCE = Path(__file__).with_name("update.c")
# No contraction and no reassociation, because results are to be the same on every machine.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_NUM_COEFFICIENTS = 7
_SQUARES = 4  # the rule's number in update.c
_CHUNK = 64 * 1024  # as there


class Formula(NamedTuple):
    """A rule of ``update.c``: its number there and what it multiplies by."""

    rule: int
    coefficients: tuple[float, ...]
    sign: float = 1.0  # of the gradient
    coupled_decay: float = 0.0
    decay: float = 1.0


class Job(NamedTuple):
    """One parameter's update. All tensors contiguous on the CPU; master and moments fp32, the others any of three."""

    formula: Formula
    scale: float
    parts: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    working: torch.Tensor | None

    def is_possible(self) -> bool:
        written = (self.weight, *self.moments)
        others = (*self.parts, *(() if self.working is None else (self.working,)))
        return all(t.dtype is torch.float32 and _is_plain(t) for t in written) and can_read(others)


class _Array(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("dtype", ctypes.c_int64))


class _Job(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * 3),
        ("squares", ctypes.c_void_p),
        ("parts", ctypes.POINTER(_Array)),
        ("working", _Array),
        ("num_parts", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("rule", ctypes.c_int64),
        ("first_chunk", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("coupled_decay", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("coefficients", ctypes.c_float * _NUM_COEFFICIENTS),
    )


def update(kernel: ctypes.CDLL, jobs: Sequence[Job]) -> None:
    """Runs the jobs on as many threads as torch would use here. Blocks; the interpreter is free meanwhile."""
    _run(kernel, list(map(_described, jobs)))


def sum_of_squares(kernel: ctypes.CDLL, parts: Sequence[torch.Tensor]) -> float:
    """Of the sum of ``parts``, in fp32 within a block and in double over blocks. The same for any number of threads."""
    count = parts[0].numel()
    squares = torch.zeros(count // _CHUNK + 1, dtype=torch.float64)
    arrays = (_Array * len(parts))(*map(_array, parts))
    job = _Job(squares=squares.data_ptr(), parts=arrays, num_parts=len(parts), count=count, rule=_SQUARES)
    _run(kernel, [job])
    return float(squares.sum())


def can_read(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel reads such gradients."""
    return all(part.dtype in _DTYPES and _is_plain(part) for part in parts)


def _run(kernel: ctypes.CDLL, described: list[_Job]) -> None:
    table = (_Job * len(described))(*described)  # points into them
    kernel.roundpipe_update(table, ctypes.c_int64(len(described)), ctypes.c_int64(torch.get_num_threads()))


def _described(job: Job) -> _Job:
    parts = (_Array * len(job.parts))(*map(_array, job.parts))
    return _Job(
        weight=job.weight.data_ptr(),
        moments=(ctypes.c_void_p * 3)(*(moment.data_ptr() for moment in job.moments)),
        parts=parts,
        working=_Array(None, 0) if job.working is None else _array(job.working),
        num_parts=len(job.parts),
        count=job.weight.numel(),
        rule=job.formula.rule,
        scale=job.formula.sign * job.scale,
        coupled_decay=job.formula.coupled_decay,
        decay=job.formula.decay,
        coefficients=(ctypes.c_float * _NUM_COEFFICIENTS)(*job.formula.coefficients),
    )


def _array(tensor: torch.Tensor) -> _Array:
    return _Array(tensor.data_ptr(), _DTYPES[tensor.dtype])


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel; None, said once, if this machine cannot make it."""
    try:
        return ctypes.CDLL(str(_compiled(_cache_folder())))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("optimizers run on torch's kernels, which are slower: update.c was not compiled (%s)", reason)
        return None


def _compiled(folder: Path) -> Path:
    """Its path in ``folder``. Processes that compile at the same time each put a whole file in place."""
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
    return Path(tempfile.mkdtemp(prefix="roundpipe-"))  # a home that cannot be written to: compiled in every process


def _processor() -> str:
    """What -march=native depends on: a home may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor() + platform.machine()
