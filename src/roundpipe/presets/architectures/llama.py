"""Llama: embeddings + masks + rotary, one layer per block, norm + head + loss.

Bit-exact against ``LlamaForCausalLM.forward`` without a cache. Decoders of the same shape (Mistral,
Qwen2, Qwen3) differ only in which mask each block takes, so their presets are `cut_decoder` with
other kinds.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..calling import (
    causal_config,
    note_lengths,
    refuse_cache,
    refuse_unsupported,
    row_wise_in,
    run_block,
)
from ..causal_lm import HeadAndLoss, LossState, assemble
from ..loss import take_loss_kwargs
from ..preset import Cut

_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}


class State(LossState):
    """What travels from layer to layer. Only ``hidden_states`` carries a gradient."""

    masks: dict[
        str, Any
    ]  # by kind of attention: what the attention implementation takes, None where it needs none
    position_embeddings: tuple[torch.Tensor, torch.Tensor]  # cos, sin
    position_ids: torch.Tensor  # (rows or 1, tokens)


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward, makes what all blocks need once per
    microbatch."""

    def __init__(self, backbone: Any, kinds: list[str]) -> None:
        super().__init__()
        self.embed_tokens = backbone.embed_tokens
        self.rotary_emb = backbone.rotary_emb
        self.config = backbone.config
        self.kinds = sorted(set(kinds))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> State:
        refuse_cache(past_key_values, use_cache)
        refuse_unsupported(self.config, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        hidden_states: torch.Tensor = (
            self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        )
        masks = self._masks(hidden_states, attention_mask, position_ids, kwargs)
        # After the masks: positions we make ourselves never restart, and looking for restarts waits
        # for the device.
        if position_ids is None:
            position_ids = torch.arange(
                hidden_states.shape[1], device=hidden_states.device
            ).unsqueeze(0)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        note_lengths(self.rotary_emb)
        return State(
            hidden_states=hidden_states,
            masks=masks,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            labels=labels,
            logits_to_keep=logits_to_keep,
            loss_kwargs=take_loss_kwargs(kwargs),
            loss_weight=loss_weight,
            skip_logits=skip_logits,
            block_kwargs=kwargs,
        )

    def _masks(
        self,
        embeds: torch.Tensor,
        attention_mask: Any,
        position_ids: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        if isinstance(attention_mask, dict):  # made by the caller already
            return attention_mask
        config = causal_config(self.config, kwargs)
        return {
            # The None is of a cache, whose name is not the same in all releases.
            kind: _MASKS[kind](config, embeds, attention_mask, None, position_ids=position_ids)
            for kind in self.kinds
        }


class Block(nn.Module):
    """One decoder block, taking the mask of its kind out of the state."""

    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.block = block
        self.kind = kind
        self.row_wise = row_wise_in(self)

    def forward(self, state: State) -> State:
        hidden_states = run_block(
            self.block,
            state["hidden_states"],
            attention_mask=state["masks"][self.kind],
            position_embeddings=state["position_embeddings"],
            position_ids=state["position_ids"],
            use_cache=False,
            **state["block_kwargs"],
        )
        return {**state, "hidden_states": hidden_states}


def cut_decoder(model: PreTrainedModel, kinds: list[str]) -> Cut:
    """Cuts a decoder of Llama's shape whose block ``i`` attends as ``kinds[i]`` says.

    There may be more kinds than blocks: a config keeps them when its number of blocks is lowered.
    """
    backbone: Any = model.model
    blocks = backbone.layers[: model.config.num_hidden_layers]
    kinds = kinds[: len(blocks)]
    return assemble(
        model,
        Prefix(backbone, kinds),
        [Block(block, kind) for block, kind in zip(blocks, kinds, strict=True)],
        HeadAndLoss(model, backbone.norm, model.lm_head),
    )


def cut(model: PreTrainedModel) -> Cut:
    """Every block attends to all that came before."""
    return cut_decoder(model, ["full_attention"] * model.config.num_hidden_layers)
