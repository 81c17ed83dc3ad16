"""Every name of TRL that is private or known to move. A new release breaks here first."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head, is_async_callable

if TYPE_CHECKING:
    from .sft import RoundPipeSFTTrainer

__all__ = [
    "FusedCausalLMOutput",
    "drop_fused_forward",
    "feed_vllm",
    "fused_outputs",
    "is_async_callable",
    "note",
    "notes_of",
    "tokens_in",
    "vllm_name",
]


class _LastStep:
    """What TRL's fused head asks of a model, where the backbone has run already."""

    def __init__(self, config: Any, head: nn.Module, hidden_states: torch.Tensor) -> None:
        self.config = config
        self.last_hidden_state = hidden_states
        self._head = head

    def base_model(self, **_: Any) -> "_LastStep":
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self._head

    def forward(self, **_: Any) -> Any:
        raise NotImplementedError


def fused_outputs(
    config: Any,
    head: nn.Module,
    hidden_states: torch.Tensor,
    labels: torch.Tensor,
    settings: Mapping[str, Any],
) -> Any:
    """What is asked of the logits of each next label, by TRL's own kernel, which makes them tile by
    tile.

    Args:
        hidden_states: (rows, tokens, hidden), after the final norm.
        labels: (rows, tokens), not shifted; -100 where none counts.
        settings: those of `add_fused_lm_head`.
    """
    step: Any = _LastStep(config, head, hidden_states)
    add_fused_lm_head(step, **settings)
    # The router's loss is the last layer's to add: the backbone that TRL would ask has run.
    outputs: Any = step.forward(fused_lm_head=True, labels=labels, output_router_logits=False)
    # Its loss is a mean over this microbatch, which nothing can be made of.
    return type(outputs)(**{name: value for name, value in outputs.items() if name != "loss"})


def drop_fused_forward(base: nn.Module) -> None:
    """Takes TRL's patch off the whole model's forward, which the pipeline never calls, so that it
    is as it came."""
    base.__dict__.pop("forward", None)


def tokens_in(inputs: Mapping[str, Any]) -> int:
    """The tokens of a batch as TRL counts them: without padding, or all of the one row. Other
    batches it refuses."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        return int(mask.sum())
    return 0 if positions is None else positions.size(1)


Notes = dict[str, dict[str, list[float]]]


def notes_of(trainer: "RoundPipeSFTTrainer") -> Notes:
    """A copy of the metrics that TRL averages at the next log."""
    return {
        mode: {name: list(values) for name, values in noted.items()}
        for mode, noted in trainer._metrics.items()
    }


def note(
    trainer: "RoundPipeSFTTrainer", before: Notes, mode: str, values: Mapping[str, list[float]]
) -> None:
    """Metrics become those of ``before`` and ``values`` in ``mode``, whatever TRL noted since."""
    for each, noted in before.items():
        trainer._metrics[each].clear()
        trainer._metrics[each].update(noted)
    for name, added in values.items():
        trainer._metrics[mode][name].extend(added)
    trainer._metrics[mode]["num_tokens"] = [trainer._total_train_tokens]


def feed_vllm(generation: Any, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
    """TRL's `VLLMGeneration` sends ``weights()`` instead of walking its model."""
    generation._iter_named_params = weights


def vllm_name(generation: Any, name: str, prefixes: list[str]) -> str:
    """What vLLM calls a weight, without ``prefixes``."""
    fixed: str = generation._fix_param_name_to_vllm(name, extra_prefixes=prefixes)
    return fixed
