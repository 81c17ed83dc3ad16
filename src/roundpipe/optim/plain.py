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
    """``torch.optim.Adafactor``, same arguments and state. Construct it over
    ``optim_parameters()``."""


class Muon(_Introduced, torch.optim.Muon):
    """``torch.optim.Muon``, same arguments and state. Construct it over matrices among
    ``optim_parameters()``."""
