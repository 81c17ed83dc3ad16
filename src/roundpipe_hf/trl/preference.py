"""`trl.DPOTrainer`, `trl.KTOTrainer` and `trl.RewardTrainer` over the pipeline engine. Data, losses
and metrics are TRL's."""

from dataclasses import dataclass
from typing import Any

from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer

from ..arguments import PipelineArguments
from .mixin import TRLMixin
from .refusals import refuse_odd_pairs


@dataclass
class RoundPipeDPOConfig(PipelineArguments, DPOConfig):
    """`trl.DPOConfig` plus the engine's settings."""


@dataclass
class RoundPipeKTOConfig(PipelineArguments, KTOConfig):
    """`trl.KTOConfig` plus the engine's settings."""


@dataclass
class RoundPipeRewardConfig(PipelineArguments, RewardConfig):
    """`trl.RewardConfig` plus the engine's settings."""


class _OfPairs(TRLMixin):
    """The first half of a batch are chosen rows, the second half those rejected for them."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        refuse_odd_pairs(type(self).__name__, inputs)
        return super()._prepare_inputs(inputs)


class RoundPipeDPOTrainer(_OfPairs, DPOTrainer):
    """`trl.DPOTrainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same losses and metrics. The reference is the model with
    its adapter off, its ``"ref"`` adapter, a model of its own, which is streamed as well, or
    computed beforehand (``precompute_ref_log_probs``).

    Raises:
        ConfigError: what `RoundPipeTrainer` refuses, ``sync_ref_model``,
            ``use_liger_kernel``, a reference model with another vocabulary, data with images for a
            model whose preset takes none, and a batch of an odd number of rows.

    Example:
        >>> args = RoundPipeDPOConfig("out", beta=0.1)
        >>> trainer = RoundPipeDPOTrainer(
        ...     "path/to/model", args=args, train_dataset=pairs, peft_config=LoraConfig()
        ... )
        >>> trainer.train()
    """

    head_fields = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


class RoundPipeKTOTrainer(TRLMixin, KTOTrainer):
    """`trl.KTOTrainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same losses and metrics. The reference is as in
    `RoundPipeDPOTrainer`.

    Raises:
        ConfigError: as `RoundPipeDPOTrainer`.

    Example:
        >>> args = RoundPipeKTOConfig("out", beta=0.1)
        >>> trainer = RoundPipeKTOTrainer("path/to/model", args=args, train_dataset=rows)
        >>> trainer.train()
    """

    head_fields = ("log_probs", "entropy", "mean_logits")


class RoundPipeRewardTrainer(_OfPairs, RewardTrainer):
    """`trl.RewardTrainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same losses and metrics. A model with a head for
    sequence classification runs by parts.

    Raises:
        ConfigError: what `RoundPipeTrainer` refuses, and a batch of an odd number of rows.

    Example:
        >>> args = RoundPipeRewardConfig("out")
        >>> trainer = RoundPipeRewardTrainer("path/to/model", args=args, train_dataset=pairs)
        >>> trainer.train()
    """
