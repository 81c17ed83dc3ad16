"""Train models far larger than the GPU: their state lives in host memory, the GPUs are stateless workers."""

from . import errors, optim
from .auto import AutoRoundPipe
from .checkpoint import load_checkpoint, save_checkpoint
from .config import RoundPipeRunConfig
from .errors import ClosedError, ConfigError, InternalError, PlanError, RoundPipeError
from .model import RoundPipe
from .optim import GradScaler, OptimizerCtx, clip_grad_norm_
from .optim.handle import StepHandle
from .packed import RoundPipePackedData
from .plan.execute_plan import ModelExecutePlan
from .profiling import profile
from .runtime.recompute_data import doing_recompute, get_recompute_data, save_for_recompute
from .wrap import wrap_model_to_roundpipe

__all__ = [
    "AutoRoundPipe",
    "ClosedError",
    "ConfigError",
    "GradScaler",
    "InternalError",
    "ModelExecutePlan",
    "OptimizerCtx",
    "PlanError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "StepHandle",
    "clip_grad_norm_",
    "doing_recompute",
    "errors",
    "get_recompute_data",
    "load_checkpoint",
    "optim",
    "profile",
    "save_checkpoint",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]
