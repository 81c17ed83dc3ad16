"""How updates are computed: by the one-pass kernel ``update.c`` where it can, else by torch's, on
the CPU chunk by chunk, on an accelerator many tensors in each operation (`foreach.py`).

ctypes lets go of the interpreter for the whole call, so the threads that feed the devices go on.
"""

import ctypes
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import do_all
from . import foreach, native
from .chunks import chunks

BLOCK = 256  # a chunk is a whole number of them, but for the last
# As in update.c:
_DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_WRITTEN = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4, torch.uint8: 5, torch.float64: 0}
_LEAN_MASTERS = (torch.float32, torch.bfloat16)
_ARRAY_BYTES = 16
_JOB_WORDS = 8
_NUM_COEFFICIENTS = 7
_NUM_KEYS = 4
_SQUARES = 5
_CHUNK = 16 * 1024

Tensors = Sequence[Tensor]
_dtype_of = operator.attrgetter("dtype")
_is_on_cpu = operator.attrgetter("is_cpu")


class Formula(NamedTuple):
    """A rule of ``update.c``: its number there, what it multiplies by, and the keys of its random
    numbers.

    ``stored``: the dtypes of its moments, if they or the master need not be fp32; the master then
    is fp32 or bf16.
    """

    rule: int
    coefficients: tuple[float, ...]
    sign: float = 1.0  # of the gradient
    coupled_decay: float = 0.0
    decay: float = 1.0
    keys: tuple[int, ...] = (0,) * _NUM_KEYS
    stored: tuple[torch.dtype, ...] | None = None


class Rule(Protocol):
    """What happens to each element, hyper-parameters included. Must be elementwise: it is given
    chunks."""

    def apply(self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors]) -> None:
        """Updates chunks (flat) of masters and their states in place. Gradients are fp32 and not to
        be written."""

    def formula(self) -> Formula | None:
        """The same for the one-pass kernel; None if that has no such rule, which then runs on the
        CPU only."""


class Decision(NamedTuple):
    """Says what an optimizer does to a master: the rule of this step, and the state that the rule
    updates along with it. The gradient is for others to find."""

    weight: Any
    moments: tuple[torch.Tensor, ...]
    rule: Rule


class RuleUpdate(NamedTuple):
    """An update by a rule. ``parts`` add up to the gradient, which is multiplied by ``scale``
    first.

    Tensors of the state may have any dtype the rule can handle; they have an element for each of
    the master's, or one for each ``BLOCK`` in a row.
    """

    weight: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    parts: tuple[torch.Tensor, ...]
    scale: float
    seen: bool
    rule: Rule

    @property
    def can_move(self) -> bool:
        return self.rule.formula() is not None and all(
            map(_is_plain_fp32, (self.weight, *self.moments))
        )

    def moved(self, weight: torch.Tensor, moments: tuple[torch.Tensor, ...]) -> "RuleUpdate":
        parts = tuple(part.to(weight.device) for part in self.parts)
        return self._replace(weight=weight, moments=moments, parts=parts)


class UpdateInto(NamedTuple):
    """An update, and the working copy that the same pass is to write, if any."""

    update: Any
    working: torch.Tensor | None


def compute(updates: Sequence[UpdateInto]) -> None:
    """Writes masters, state and the working copies given. Blocks; the interpreter is free
    meanwhile.

    One that raises keeps none of the others from being done, but for what an accelerator does in
    the same operation: the first error is raised when they are.
    """
    with torch.no_grad():
        if len(updates) == 1:
            _compute_alone(updates[0])
        elif not _are_done_together(updates):
            do_all(partial(_compute_alone, each) for each in updates)


def _are_done_together(updates: Sequence[UpdateInto]) -> bool:
    """False, with nothing done, if each is to be computed alone."""
    try:
        if _by_kernel(updates):
            return True
    except Exception:
        return False  # because one of them cannot be done: that raises again when it is alone
    if any(each.update.weight.device.type == "cpu" for each in updates):
        return False
    foreach.update(updates)
    return True


def _compute_alone(each: UpdateInto) -> None:
    if _by_kernel([each]):
        return
    if each.update.weight.device.type == "cpu":
        _in_chunks(*each)
    else:
        foreach.update([each])


def _in_chunks(update: Any, working: torch.Tensor | None) -> None:
    weight = update.weight.data.view(-1)
    moments = [moment.view(-1) for moment in update.moments]
    target = working.data.view(-1) if working is not None and working.is_contiguous() else None
    for where, gradient in chunks(update.parts, update.scale):
        pieces = [_piece(moment, where, weight.numel()) for moment in moments]
        update.rule.apply([weight[where]], [gradient], [pieces])
        if target is not None:
            target[where].copy_(weight[where])
    if working is not None and target is None:
        working.data.copy_(update.weight.data)


def _piece(moment: torch.Tensor, where: slice, count: int) -> torch.Tensor:
    return (
        moment[where]
        if moment.numel() == count
        else moment[where.start // BLOCK : -(-where.stop // BLOCK)]
    )


# The kernel.


class _Formula(ctypes.Structure):
    _fields_ = (
        ("rule", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("coupled_decay", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("coefficients", ctypes.c_float * _NUM_COEFFICIENTS),
        ("keys", ctypes.c_uint32 * _NUM_KEYS),
    )


def _by_kernel(updates: Sequence[Any]) -> bool:
    """All of them in one pass, on as many threads as torch would use here.

    What is done here for each parameter keeps the threads waiting that feed the devices, so it is
    little.

    Returns:
        False, with nothing done, if there is one that the kernel cannot do: it has no such rule, or
        cannot use a tensor. What is updated must be fp32 or as the rule says, the others any of
        three dtypes, all contiguous and on the CPU.
    """
    kernel = native.library()
    # Many have the same.
    rules: dict[int, Rule] = {id(update.rule): update.rule for update, _ in updates}
    formulas: dict[int, Any] = {key: rule.formula() for key, rule in rules.items()}
    if kernel is None or None in formulas.values():
        return False
    rows: list[int] = []
    written: list[torch.Tensor] = []
    exact: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    described: dict[tuple[int, float], _Formula] = {}
    for (weight, moments, parts, scale, _, rule), working in updates:
        key, formula = (id(rule), scale), formulas[id(rule)]
        if key not in described:
            described[key] = _described(formula, scale)
        if formula.stored is None:
            exact += (weight, *moments)
        elif not _is_stored_as(formula.stored, weight, moments):
            return False
        rows += (
            ctypes.addressof(described[key]),
            1 + len(moments),
            len(parts),
            working is not None,
            weight.numel(),
            0,
            0,
            0,
        )
        written += (weight, *moments)
        others += parts
        if working is not None:
            others.append(working)
    dtypes = list(map(_DTYPES.get, map(_dtype_of, others)))
    if not (
        set(map(_dtype_of, exact)) <= {torch.float32}
        and None not in dtypes
        and _are_plain(written + others)
    ):
        return False
    _run(kernel, rows, written, others, dtypes)
    return True


def _is_stored_as(stored: Sequence[Any], weight: Tensor, moments: Sequence[Tensor]) -> bool:
    """Its sizes too, because the kernel would go past the end where torch raises."""
    count = weight.numel()
    sizes = [count, -(-count // BLOCK)] * 2 if len(stored) == 4 else [count] * 2
    return (
        weight.dtype in _LEAN_MASTERS
        and list(stored) == list(map(_dtype_of, moments))
        and sizes == list(map(torch.Tensor.numel, moments))
    )


def sum_of_squares(parts: Sequence[torch.Tensor]) -> float:
    """Of the sum of ``parts``. In fp32 within a block or chunk and in double over those; the same
    for any number of threads."""
    if not any(part.is_cpu for part in parts):
        return foreach.sum_of_squares(parts)
    kernel = native.library()
    if kernel is None or not all(part.dtype in _DTYPES for part in parts) or not _are_plain(parts):
        return math.fsum(float(torch.dot(values, values)) for _, values in chunks(parts))
    count = parts[0].numel()
    squares = torch.zeros(count // _CHUNK + 1, dtype=torch.float64)
    described = _Formula(rule=_SQUARES)
    row = ctypes.addressof(described), 1, len(parts), False, count, 0, 0, 0
    _run(kernel, row, [squares], parts, [_DTYPES[part.dtype] for part in parts])
    return float(squares.sum())


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
    updated = _arrays(written, map(_WRITTEN.__getitem__, map(_dtype_of, written)))
    read = _arrays(others, dtypes)
    tables = (table.buffer_info()[0] for table in (jobs, updated, read))
    kernel.roundpipe_update(*tables, len(rows) // _JOB_WORDS, torch.get_num_threads())


def _arrays(tensors: Sequence[torch.Tensor], dtypes: Iterable[Any]) -> "array[int]":
    """Addresses and dtypes, as update.c wants them."""
    table = array("q", bytes(_ARRAY_BYTES * len(tensors)))
    table[0::2] = array("q", map(torch.Tensor.data_ptr, tensors))
    table[1::2] = array("q", dtypes)
    return table


def _described(formula: Any, scale: float) -> _Formula:
    return _Formula(
        rule=formula.rule,
        scale=formula.sign * scale,
        coupled_decay=formula.coupled_decay,
        decay=formula.decay,
        coefficients=(ctypes.c_float * _NUM_COEFFICIENTS)(*formula.coefficients),
        keys=(ctypes.c_uint32 * _NUM_KEYS)(*formula.keys),
    )


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(_is_on_cpu, tensors)) and all(map(torch.Tensor.is_contiguous, tensors))


def _is_plain_fp32(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()
