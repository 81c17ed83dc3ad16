"""Decides the dtypes of masters and gradients."""

from typing import NamedTuple

import torch
from torch import nn


class GradientDtypes(NamedTuple):
    """``summed``: what microbatches add up in; ``offloaded``: what crosses to the host, rounded
    once."""

    summed: torch.dtype
    offloaded: torch.dtype


class GradientRules:
    """Decides the dtypes of masters and gradients.

    Sums are in fp32 whenever masters are (or wider, if the weights are); they offload in
    ``grad_dtype`` or the working dtype.
    """

    def __init__(self, optim_dtype: torch.dtype | None, grad_dtype: torch.dtype | None) -> None:
        self._optim_dtype = optim_dtype
        self._grad_dtype = grad_dtype

    def master(self, parameter: nn.Parameter) -> torch.dtype:
        return _of_kind(self._optim_dtype, parameter)

    def dtypes(self, parameter: nn.Parameter) -> GradientDtypes:
        summed = torch.promote_types(parameter.dtype, self.master(parameter))
        return GradientDtypes(summed, _of_kind(self._grad_dtype, parameter))


def _of_kind(dtype: torch.dtype | None, parameter: nn.Parameter) -> torch.dtype:
    """``dtype``, or the complex one that is made of it: a real one would drop half of a complex
    weight."""
    if dtype is None:
        return parameter.dtype
    return torch.promote_types(dtype, torch.complex64) if parameter.is_complex() else dtype
