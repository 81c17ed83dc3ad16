"""Train models far larger than the GPU: their state lives in host memory, the GPUs are stateless
workers."""

# First, because what comes after it loads torch.
from .system import loading  # noqa: F401

# isort: split
from . import errors, optim
from .config import RoundPipeRunConfig
from .device.choose import virtual
from .engine.checkpoint import consolidate_checkpoint, load_checkpoint, save_checkpoint
from .engine.partitioned import AutoRoundPipe
from .engine.sequential import RoundPipe
from .engine.wrap import wrap_model_to_roundpipe
from .errors import ClosedError, ConfigError, InternalError, PlanError, RoundPipeError
from .forecast.estimate import estimate
from .microbatch.packed import RoundPipePackedData
from .optim import GradScaler, OptimizerCtx, clip_grad_norm_
from .plan.execute_plan import ModelExecutePlan
from .recompute.user_data import doing_recompute, get_recompute_data, save_for_recompute
from .step.handle import StepHandle
from .trace.profile import profile

__version__ = "0.1.0"

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
    "consolidate_checkpoint",
    "doing_recompute",
    "errors",
    "estimate",
    "get_recompute_data",
    "load_checkpoint",
    "optim",
    "profile",
    "save_checkpoint",
    "save_for_recompute",
    "virtual",
    "wrap_model_to_roundpipe",
]
