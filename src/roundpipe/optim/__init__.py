"""What users construct: optimizers over masters, clipping, and loss scaling.

Imports `step`, `params`, `kernels` and what these may import.
"""

from ..step.context import OptimizerCtx
from .clipping import clip_grad_norm_
from .grad_scaler import GradScaler
from .lean import LeanAdamW
from .lion import Lion
from .optimizers import SGD, Adafactor, Adam, AdamW, Muon

__all__ = [
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "GradScaler",
    "LeanAdamW",
    "Lion",
    "Muon",
    "OptimizerCtx",
    "clip_grad_norm_",
]
