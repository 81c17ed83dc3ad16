"""TRL's trainers over the engine, each with its config. Imports every other room.

A package of its own, because `trl` is an extra.
"""

from .preference import (
    RoundPipeDPOConfig,
    RoundPipeDPOTrainer,
    RoundPipeKTOConfig,
    RoundPipeKTOTrainer,
    RoundPipeRewardConfig,
    RoundPipeRewardTrainer,
)
from .rollouts import (
    RoundPipeGRPOConfig,
    RoundPipeGRPOTrainer,
    RoundPipeRLOOConfig,
    RoundPipeRLOOTrainer,
)
from .sft import RoundPipeSFTConfig, RoundPipeSFTTrainer

__all__ = [
    "RoundPipeDPOConfig",
    "RoundPipeDPOTrainer",
    "RoundPipeGRPOConfig",
    "RoundPipeGRPOTrainer",
    "RoundPipeKTOConfig",
    "RoundPipeKTOTrainer",
    "RoundPipeRLOOConfig",
    "RoundPipeRLOOTrainer",
    "RoundPipeRewardConfig",
    "RoundPipeRewardTrainer",
    "RoundPipeSFTConfig",
    "RoundPipeSFTTrainer",
]
