"""torch's optimizers whose update is more than elementwise: they run as torch wrote them, on
``.grad``."""

import torch

from .state import SteadyState


class Adafactor(SteadyState, torch.optim.Adafactor):
    """``torch.optim.Adafactor``, same arguments and state. Construct it over
    ``optim_parameters()``."""


class Muon(SteadyState, torch.optim.Muon):
    """``torch.optim.Muon``, same arguments and state. Construct it over matrices among
    ``optim_parameters()``."""
