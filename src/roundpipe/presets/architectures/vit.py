"""ViT for image classification: patches, blocks, norm + classifier of the first token + loss.

Bit-exact against ``ViTForImageClassification.forward``.
"""

from typing import Any, TypedDict

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import ImageClassifierOutput

from ...microbatch import split
from ..calling import by_name, refuse_unknown, refuse_unsupported, run_block
from ..loss import Loss, merge_outputs, take_loss_kwargs, weighted
from ..preset import Cut, SplitForward


class State(TypedDict):
    """What travels from layer to layer. Only ``hidden_states`` carries a gradient."""

    hidden_states: torch.Tensor  # (rows, 1 + patches, hidden)
    mask: Any  # what the attention implementation takes, None where it needs none
    block_kwargs: dict[str, Any]
    labels: torch.Tensor | None
    loss_kwargs: dict[str, Any]
    loss_weight: float | None  # see loss.py


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.embeddings = backbone.embeddings
        self.config = backbone.config

    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        loss_weight: float | None = None,
        **kwargs: Any,
    ) -> State:
        refuse_unsupported(self.config, kwargs)
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.embeddings(
            pixel_values, bool_masked_pos=None, interpolate_pos_encoding=interpolate_pos_encoding
        )
        return State(
            hidden_states=hidden_states,
            mask=create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            ),
            labels=labels,
            loss_kwargs=take_loss_kwargs(kwargs),
            loss_weight=loss_weight,
            block_kwargs=kwargs,
        )


class Block(nn.Module):
    """One encoder block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, state: State) -> State:
        hidden_states = run_block(
            self.block, state["hidden_states"], state["mask"], **state["block_kwargs"]
        )
        return {**state, "hidden_states": hidden_states}


class Suffix(nn.Module):
    """Last layer: norm, classifier, and the loss when labels were given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layernorm = model.vit.layernorm
        self.classifier = model.classifier
        self.config = model.config
        self.loss = Loss(model)

    def forward(self, state: State) -> ImageClassifierOutput:
        hidden_states = self.layernorm(state["hidden_states"])
        logits = self.classifier(hidden_states[:, 0, :])
        labels, kwargs, loss = (
            state["labels"],
            {**state["block_kwargs"], **state["loss_kwargs"]},
            None,
        )
        if labels is not None:
            loss = weighted(
                logits,
                state["loss_weight"],
                lambda: self.loss.function(labels, logits, self.config, **kwargs),
            )
        # Its stub says FloatTensor.
        return ImageClassifierOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


def split_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cuts the arguments of the model's forward into microbatches whose losses add up to that of
    the batch.

    Only cross-entropy heeds ``num_items_in_batch``, a sum then. Everything else is a mean: over
    images that have a class, or over all images.
    """
    named = by_name(type(model), args, kwargs)
    refuse_unknown(model, named)
    whole = {
        name: named.pop(name) for name in ("num_items_in_batch", "loss_weight") if name in named
    }
    parts = [part | whole for _, part in split((), named, None, n).inputs]
    if len(parts) > 1 and named.get("labels") is not None:
        has_classes = _has_classes(model.config, named["labels"])
        is_sum = (
            has_classes
            and whole.get("num_items_in_batch") is not None
            and Loss(model).heeds_num_items()
        )
        if not is_sum:
            counts = [_counted(part, has_classes) for part in parts]
            for part, count in zip(parts, counts, strict=True):
                part["loss_weight"] = count / max(sum(counts), 1)
    return [()] * len(parts), parts


def refuse_unread(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for keywords that nothing in the model reads."""
    refuse_unknown(model, by_name(type(model), args, kwargs))


def _has_classes(config: Any, labels: torch.Tensor) -> bool:
    """Whether the loss is a cross-entropy, by the rule of transformers' own, which decides it in
    its first call."""
    if config.problem_type is not None:
        return bool(config.problem_type == "single_label_classification")
    return config.num_labels > 1 and labels.dtype in (torch.long, torch.int)


def _counted(part: dict[str, Any], has_classes: bool) -> int:
    labels: torch.Tensor = part["labels"]
    return int(labels.ne(part.get("ignore_index", -100)).sum()) if has_classes else len(labels)


def cut(model: PreTrainedModel) -> Cut:
    """Embeddings, one layer per block, head."""
    backbone: Any = model.vit
    return Cut(
        sequential=nn.Sequential(
            Prefix(backbone), *(Block(block) for block in backbone.layers), Suffix(model)
        ),
        split_input=SplitForward(model=model, split=split_batch, check=refuse_unread),
        merge_output=merge_outputs,
    )
