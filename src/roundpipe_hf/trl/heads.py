"""How the pipeline answers the model calls of TRL's trainers.

[Note: fused head] TRL calls the model with ``fused_lm_head=True`` and gets no logits but what it
needs of them for each next label: its log-probability, the entropy there, and so on. The pipeline's
last layer answers with TRL's own kernel, so logits exist only tile by tile. Where a loss is made of
logits, and for architectures without a preset of their own, the pipeline runs the model plainly and
the answer is made of the logits.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.errors import ConfigError

from ..loss.model_call import ModelAnswer
from .compat import FusedCausalLMOutput, fused_outputs

_IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Head:
    """What a trainer asks of the logits, as TRL's `add_fused_lm_head` names it."""

    fields: tuple[str, ...]
    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "outputs": self.fields,
            "temperature": self.temperature,
            "cast_lm_head_to_fp32": self.cast_lm_head_to_fp32,
        }


class FusedAnswer(ModelAnswer):
    """The last layer answers with per-token values. See [Note: fused head]."""

    def __init__(self, head: Head) -> None:
        self._readout = functools.partial(_read_out, head.settings())

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        asked = {name: value for name, value in given.items() if name != "fused_lm_head"}
        return asked | {"readout": self._readout} if given.get("fused_lm_head") else asked


class LogitsAnswer(ModelAnswer):
    """The pipeline runs the model without labels; every call is answered with those logits or what
    they say."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value for name, value in given.items() if name not in ("fused_lm_head", "labels")
        }

    def outputs(self, outputs: Any, given: Mapping[str, Any]) -> Any:
        if not given.get("fused_lm_head"):
            return outputs
        made = _of_logits(outputs.logits, given["labels"], self._head.temperature)
        made.aux_loss = getattr(outputs, "aux_loss", None)
        return made

    def repeat(self) -> None:
        """TRL calls the model for its loss, then for its metrics."""


def _read_out(
    settings: Mapping[str, Any], head: Any, hidden_states: torch.Tensor, labels: torch.Tensor | None
) -> Any:
    if labels is None:
        raise ConfigError("TRL's loss needs labels in every batch; the data collator made none")
    return fused_outputs(head.config, head.head, hidden_states, labels, settings)


def _of_logits(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> Any:
    """What the fused head says."""
    targets = labels[:, 1:].to(logits.device)
    mask = targets != _IGNORED
    scaled = logits[:, :-1].float() / temperature
    log_p = scaled.log_softmax(dim=-1)
    chosen = targets.clamp(min=0).unsqueeze(-1)

    def kept(values: torch.Tensor) -> torch.Tensor:
        return values.masked_fill(~mask, 0.0)

    return FusedCausalLMOutput(
        log_probs=kept(log_p.gather(-1, chosen).squeeze(-1)),
        entropy=kept(-(log_p.exp() * log_p).sum(dim=-1)),
        log_sum_sq_probs=kept((2 * log_p).logsumexp(dim=-1)),
        mean_logits=kept(scaled.mean(dim=-1)),
        is_top1=(log_p.argmax(dim=-1) == targets) & mask,
        label_mask=mask,
    )
