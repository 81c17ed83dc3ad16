"""Compiles the kernels that every training needs while the first batch is still on its way."""

import logging
from collections.abc import Iterable

import torch

from . import native, triton_kernels

_log = logging.getLogger("roundpipe")
_NARROW = (torch.bfloat16, torch.float16)
_ROWS, _COLUMNS = 16, 4096  # Triton tells sizes apart by whether 16 divides them


def compile_ahead(devices: Iterable[torch.device], dtypes: Iterable[torch.dtype]) -> None:
    """Runs each GPU kernel once on little memory of each device, and compiles or loads the
    optimizer's pass. ``dtypes`` are those of the weights that are trained.

    In a first step, hashing Triton's own sources and compiling took 0.9 s while a device waited;
    with nothing in caches 2.1 s, and the optimizer's pass 1.1 s. Never raises: a kernel that cannot
    be compiled says so where it is used.
    """
    found = list(dtypes)
    if not found:
        return
    try:
        for device in devices:
            for dtype in found:
                _run_all(device, dtype)
        native.library()
    except Exception as error:
        _log.debug("kernels were not compiled ahead: %s", error)


def _run_all(device: torch.device, dtype: torch.dtype) -> None:
    sums, entropy = triton_kernels("gradient_sums"), triton_kernels("cross_entropy")
    if sums is None or entropy is None:
        return
    logits = torch.zeros(_ROWS, _COLUMNS, dtype=dtype, device=device)
    if entropy.suits(logits):
        # As for a loss over tokens whose labels may be -100.
        labels = torch.zeros(_ROWS, dtype=torch.int64, device=device)
        entropy.cross_entropy_(
            logits, labels, ignored=-100, smoothing=0.0, scale=1.0, makes_gradient=True
        )
    if dtype in _NARROW:
        sums.rounded(sums.add(sums.add(logits, logits), logits), dtype)
