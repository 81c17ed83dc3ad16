"""The optimizer side: optimizers over masters, clipping, and the thread that steps them behind the GPU's back."""

from .clipping import clip_grad_norm_
from .context import OptimizerCtx
from .optimizers import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW", "OptimizerCtx", "clip_grad_norm_"]
