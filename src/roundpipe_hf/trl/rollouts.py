"""`trl.GRPOTrainer` and `trl.RLOOTrainer` over the pipeline engine. Rollouts, rewards, losses and
metrics are TRL's.

Log-probabilities of policy and reference come from engines; rollouts are generated on the first
device, by a copy of the model (see [Note: generating copy]).
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from roundpipe.errors import ConfigError

from ..arguments import PipelineArguments
from .heads import Head
from .mixin import TRLMixin, to_device
from .refusals import checked_reward, refuse_long_prompts
from .vllm import refuse_shared_device, send_merged_weights


@dataclass
class RoundPipeGRPOConfig(PipelineArguments, GRPOConfig):
    """`trl.GRPOConfig` plus the engine's settings."""


@dataclass
class RoundPipeRLOOConfig(PipelineArguments, RLOOConfig):
    """`trl.RLOOConfig` plus the engine's settings."""


class _RolloutMixin(TRLMixin):
    head_fields = ("log_probs", "entropy")
    temperature: float
    use_vllm: bool
    reward_funcs: Any
    reward_func_names: list[str]
    vllm_generation: Any
    _step: int
    _rolls_out = False
    _metrics: Any
    _current_train_step_time: float

    def __init__(self, model: Any = None, *others: Any, **kwargs: Any) -> None:
        for args in (*others, kwargs.get("args")):
            for name, why in _REFUSED.items():
                if getattr(args, name, False):
                    raise ConfigError(
                        f"{type(self).__name__} does not support {name}: {why}; leave it out"
                    )
            if getattr(args, "use_vllm", False) and getattr(args, "world_size", 1) > 1:
                raise ConfigError(
                    f"{type(self).__name__} does not support use_vllm in {args.world_size} "
                    "processes: each would send its weights to the server; leave it out, or start "
                    "one process, which drives all devices of its machine"
                )
            if getattr(args, "use_vllm", False):
                refuse_shared_device(type(self).__name__, args)
        super().__init__(model, *others, **kwargs)
        named = zip(self.reward_func_names, self.reward_funcs, strict=True)
        self.reward_funcs = [checked_reward(name, reward) for name, reward in named]
        if self.use_vllm:
            send_merged_weights(self, self.vllm_generation)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts as TRL's does, which decides when rollouts are due."""
        started = time.perf_counter()
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """On the first device, beside optimizer state that stays there; TRL goes on with the tokens
        on the Trainer's."""
        refuse_long_prompts(self, prompt_ids)
        self._engine(trains=False)  # by which the model generates
        self._rolls_out = True
        try:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._rolls_out = False

    def _prepare_input(self, data: Any) -> Any:
        data = super()._prepare_input(data)
        return to_device(data, self.args.device) if self._rolls_out else data

    def _head(self, fields: tuple[str, ...]) -> Head:
        to_fp32 = getattr(self.args, "cast_lm_head_to_fp32", False)
        return Head(fields=fields, temperature=self.temperature, cast_lm_head_to_fp32=to_fp32)


_REFUSED = {"use_transformers_continuous_batching": "it casts the model's weights where they are"}


class RoundPipeGRPOTrainer(_RolloutMixin, GRPOTrainer):
    """`trl.GRPOTrainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same rollouts, losses and metrics. Rollouts are generated
    on the first device. Of a model that does not fit there the rest passes through it, once for
    every token of all sequences; adapters of one that fits are merged into the copy. With
    ``use_vllm`` vLLM makes them, elsewhere, and gets the newest weights one layer at a time.

    Raises:
        ConfigError: what `RoundPipeTrainer` refuses, ``sync_ref_model``,
            ``use_transformers_continuous_batching``, ``use_vllm`` in several processes, or with an
            engine of vLLM's on a device that this one computes on, a reference model with another
            vocabulary, a prompt that fills the model's context, data with images for a model whose
            preset takes none, and rewards that are no numbers.

    Example:
        >>> args = RoundPipeGRPOConfig("out", num_generations=8)
        >>> trainer = RoundPipeGRPOTrainer(
        ...     "path/to/model", reward_funcs=reward, args=args, train_dataset=prompts
        ... )
        >>> trainer.train()
    """


class RoundPipeRLOOTrainer(_RolloutMixin, RLOOTrainer):
    """`trl.RLOOTrainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same rollouts, losses and metrics. Rollouts are generated
    on the first device. Of a model that does not fit there the rest passes through it, once for
    every token of all sequences; adapters of one that fits are merged into the copy.

    Raises:
        ConfigError: as `RoundPipeGRPOTrainer`.

    Example:
        >>> args = RoundPipeRLOOConfig("out", num_generations=8)
        >>> trainer = RoundPipeRLOOTrainer(
        ...     "path/to/model", reward_funcs=reward, args=args, train_dataset=prompts
        ... )
        >>> trainer.train()
    """
