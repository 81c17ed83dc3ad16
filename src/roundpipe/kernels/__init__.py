"""Kernels for the CPU and the GPU, each beside the plain torch code that it must agree with.

Imports `system`, `errors` and torch.
"""

import functools
import importlib
import importlib.util
from types import ModuleType


@functools.cache
def triton_kernels(name: str) -> ModuleType | None:
    """The module of that name here; None where there is no Triton, which torch brings along for
    GPUs on Linux."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f".{name}", __package__)
