"""Train models far larger than the GPU: their state lives in host memory, the GPUs are stateless workers."""

from . import errors, optim
from .config import RoundPipeRunConfig
from .errors import ClosedError, ConfigError, InternalError, PlanError, RoundPipeError
from .model import RoundPipe
from .optim import OptimizerCtx, clip_grad_norm_
from .optim.step_thread import StepHandle
from .plan.execute_plan import ModelExecutePlan
from .wrap import wrap_model_to_roundpipe

__all__ = [
    "ClosedError",
    "ConfigError",
    "InternalError",
    "ModelExecutePlan",
    "OptimizerCtx",
    "PlanError",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipeRunConfig",
    "StepHandle",
    "clip_grad_norm_",
    "errors",
    "optim",
    "wrap_model_to_roundpipe",
]
