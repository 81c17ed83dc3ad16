"""`trl.SFTTrainer` over the pipeline engine. Data, packing and loss are TRL's; here is what the
loss gets of the model.

What its model calls are answered with: see [Note: fused head] in heads.py.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from roundpipe.presets.preset import has_causal_preset
from roundpipe.threads.worker import in_worker

from ..arguments import PipelineArguments
from ..compat import base_model
from ..engine.slot import has_readable_head
from ..loss.model_call import ModelAnswer, ModelStandIn, Replay
from ..trainer.mixin import RoundPipeTrainerMixin
from .by_name import load_by_name, without_false_warning
from .compat import FusedCausalLMOutput, drop_fused_forward, note, notes_of, tokens_in
from .heads import FusedAnswer, Head, LogitsAnswer
from .refusals import refuse_data_and_model

logger = logging.getLogger(__name__)

_HEAD = Head(fields=("log_probs", "entropy", "is_top1"))


@dataclass
class RoundPipeSFTConfig(PipelineArguments, SFTConfig):
    """`trl.SFTConfig` plus the engine's settings, see `PipelineArguments`."""


class RoundPipeSFTTrainer(RoundPipeTrainerMixin, SFTTrainer):
    """`trl.SFTTrainer` whose models may be far larger than the memory of the devices.

    Takes the same arguments and gives the same results and metrics; packing and padding-free
    batches included, whose single row is one microbatch, so accumulate to keep several devices
    busy. ``model`` is a model in host memory, or a name or folder, loaded in the dtype of its files
    and into host memory; ``args`` a `RoundPipeSFTConfig` or a plain `SFTConfig`; ``others`` what
    `SFTTrainer` takes.

    Raises:
        ConfigError: what `RoundPipeTrainer` refuses, data sets with images for models whose preset
            takes none, and the auxiliary loss of mixtures of experts whose routers are not
            understood.

    Example:
        >>> args = RoundPipeSFTConfig("out", packing=True, max_length=2048)
        >>> trainer = RoundPipeSFTTrainer(
        ...     "path/to/model", args, train_dataset=dataset, peft_config=LoraConfig()
        ... )
        >>> trainer.train()
    """

    args: RoundPipeSFTConfig  # or a plain SFTConfig

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **kwargs: Any) -> None:
        is_named = isinstance(model, str)
        if is_named:
            model = load_by_name(model, args, kwargs)
        with without_false_warning(type(self), is_loaded=is_named):
            super().__init__(model, args, *others, **kwargs)
        self._tally = Tally()
        self._stashed_tokens = 0
        gather = self.accelerator.gather_for_metrics
        # TRL's loss gathers its metrics at every microbatch, of which processes may have different
        # numbers; those of a batch are summed afterwards.
        self.accelerator.gather_for_metrics = lambda value, *args, **kwargs: (
            value if in_worker() else gather(value, *args, **kwargs)
        )
        refuse_data_and_model(self)
        drop_fused_forward(base_model(self.model))
        if not has_causal_preset(self.model):
            logger.warning(
                "%s has no preset of its own, so the logits of a microbatch exist as a whole; use "
                "small microbatches",
                type(base_model(self.model)).__name__,
            )

    @property
    def answer(self) -> ModelAnswer:  # type: ignore[override]  # chosen anew for every model
        """See [Note: fused head]."""
        smooths = self.label_smoother is not None and self.args.loss_type == "nll"
        wants_logits = smooths or self.compute_loss_func is not None
        has_head = has_readable_head(self.model, self._engine(trains=False))
        return FusedAnswer(_HEAD) if has_head and not wants_logits else LogitsAnswer(_HEAD)

    def has_stock_loss(self) -> bool:
        """Returns True for TRL's own loss, which adds up as Trainer's does: log-probabilities,
        summed and divided by the window's tokens."""
        owners = [cls for cls in type(self).__mro__ if "compute_loss" in vars(cls)]
        return owners[0] is RoundPipeSFTTrainer and "compute_loss" not in vars(self)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Computes TRL's loss, and counts for its metrics what each microbatch says of its
        tokens."""
        watched = _Watched(model, self._tally) if isinstance(model, Replay) else model
        return super().compute_loss(
            watched, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Trains as `RoundPipeTrainerMixin` does, and counts the tokens of ``inputs`` for TRL."""
        self._stashed_tokens += tokens_in(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def _run_window(self) -> list[torch.Tensor]:
        stashed = torch.tensor([float(self._stashed_tokens)], dtype=torch.float64)
        total = self._total_train_tokens + int(self._summed(stashed))
        self._stashed_tokens = 0
        with self._one_value_per_batch("train"):
            losses = super()._run_window()
            # TRL counts in every microbatch, on several threads at once.
            self._total_train_tokens = total
        return losses

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts one batch, and notes one value of each metric for it."""
        with self._one_value_per_batch("eval"):
            return super().prediction_step(*args, **kwargs)

    @contextmanager
    def _one_value_per_batch(self, mode: str) -> Iterator[None]:
        """Metrics are noted as if batches had not been cut. Nothing is, where the batch was called
        whole."""
        before = notes_of(self)
        self._tally.clear()
        yield
        values = self._tally.values(self._summed)
        if values:
            note(self, before, mode, values)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes."""
        if self.args.world_size == 1:
            return values
        summed: torch.Tensor = self.accelerator.reduce(values.to(self.args.device), "sum")
        return summed.cpu()


class Tally:
    """What the microbatches of a round add up to, batch by batch. Added to by workers, read by the
    user's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[int, list[torch.Tensor]] = defaultdict(list)

    def clear(self) -> None:
        self._sums.clear()

    def add(self, batch: int, outputs: Any) -> None:
        """Sums stay on their device: reading one would make the worker wait for it."""
        sums = [outputs.label_mask.sum(), outputs.entropy.detach().sum(), outputs.is_top1.sum()]
        added = torch.stack([sum_.to(torch.float32) for sum_ in sums])
        with self._lock:
            self._sums[batch].append(added)

    def values(
        self, over_processes: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, list[float]]:
        """TRL's metrics, one value per batch; none if no microbatch was counted. ``over_processes``
        sums."""
        entropies, accuracies = [], []
        for batch in sorted(self._sums):
            own = torch.stack([sums.cpu().double() for sums in self._sums[batch]]).sum(0)
            valid, entropy, correct = over_processes(own).tolist()
            entropies.append(entropy / valid if valid else 0.0)
            accuracies.append(correct / valid if valid else 0.0)
        return {"entropy": entropies, "mean_token_accuracy": accuracies} if entropies else {}


class _Watched(ModelStandIn):
    """Counts what a microbatch's answer says about tokens."""

    def __init__(self, replay: Replay, tally: Tally) -> None:
        # Reads fall through to it, and on to the model.
        super().__init__(replay)  # type: ignore[arg-type]
        self._replay = replay
        self._tally = tally

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._replay(*args, **kwargs)
        if isinstance(outputs, FusedCausalLMOutput):
            self._tally.add(self._replay.batch, outputs)
        return outputs
