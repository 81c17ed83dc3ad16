"""The public names of `trl.sft`, at the address that scripts use."""

from .trl.sft import RoundPipeSFTConfig, RoundPipeSFTTrainer

__all__ = ["RoundPipeSFTConfig", "RoundPipeSFTTrainer"]
