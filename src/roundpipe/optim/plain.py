"""torch's optimizers whose update is more than elementwise: they run as torch wrote them, on
``.grad``."""

from typing import Any

import torch

from ..step import context
from .state import SteadyState


class _Introduced(SteadyState, torch.optim.Optimizer):
    """Known to the engine from the start. To be named before a class of ``torch.optim``."""

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        context.introduce(self)


class Adafactor(_Introduced, torch.optim.Adafactor):
    """Adafactor (Shazeer and Stern 2018), which keeps a row and a column instead of a matrix of
    second moments.

    Takes the arguments of ``torch.optim.Adafactor`` and keeps its state. Runs torch's own step on
    ``.grad``, which takes 4 bytes per element while it runs. Construct it over
    ``optim_parameters()``.
    """


class Muon(_Introduced, torch.optim.Muon):
    """Muon (Jordan et al. 2024): momentum made orthogonal by Newton-Schulz iterations.

    Takes the arguments of ``torch.optim.Muon`` and keeps its state, 4 bytes per element. Runs
    torch's own step on ``.grad``, which takes 4 more while it runs. Construct it over the matrices
    among ``optim_parameters()``, and another optimizer over the rest.

    Example:
        >>> masters = engine.optim_parameters()
        >>> muon = roundpipe.optim.Muon([master for master in masters if master.ndim == 2])
        >>> adamw = roundpipe.optim.AdamW([master for master in masters if master.ndim != 2])
    """
