"""GPT-2: learnt positions added to the embeddings, blocks, norm + head (tied to the embeddings) +
loss.

Bit-exact against ``GPT2LMHeadModel.forward`` without a cache. Cross-attention to an encoder is
refused.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from ...errors import ConfigError
from ..calling import causal_config, refuse_cache, refuse_unsupported, row_wise_in, run_block
from ..causal_lm import HeadAndLoss, LossState, assemble
from ..loss import take_loss_kwargs
from ..preset import Cut


class State(LossState):
    """What travels from layer to layer. Only ``hidden_states`` carries a gradient."""

    mask: Any  # what the attention implementation takes, None where it needs none
    position_ids: torch.Tensor  # (rows or 1, tokens)


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.wte = backbone.wte
        self.wpe = backbone.wpe
        self.drop = backbone.drop
        self.config = backbone.config

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        past_key_values: None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> State:
        refuse_cache(past_key_values, use_cache)
        refuse_unsupported(self.config, kwargs)
        if encoder_hidden_states is not None or encoder_attention_mask is not None:
            raise ConfigError(
                "encoder_hidden_states: GPT-2 runs as a decoder only in the pipeline; leave it out"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        embeds: torch.Tensor = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(
            causal_config(self.config, kwargs),
            embeds,
            attention_mask,
            None,  # of a cache, whose name is not the same in all releases
            position_ids=position_ids,
        )
        # After the mask: positions we make ourselves never restart, and looking for restarts waits
        # for the device.
        if position_ids is None:
            position_ids = torch.arange(embeds.shape[1], device=embeds.device).unsqueeze(0)
        hidden_states = embeds + self.wpe(position_ids)
        if token_type_ids is not None:
            hidden_states = hidden_states + self.wte(token_type_ids)
        return State(
            hidden_states=self.drop(hidden_states),
            mask=mask,
            position_ids=position_ids,
            labels=labels,
            logits_to_keep=logits_to_keep,
            loss_kwargs=take_loss_kwargs(kwargs),
            loss_weight=loss_weight,
            skip_logits=skip_logits,
            block_kwargs=kwargs,
        )


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.row_wise = row_wise_in(self)

    def forward(self, state: State) -> State:
        hidden_states = run_block(
            self.block,
            state["hidden_states"],
            None,
            state["mask"],
            None,
            encoder_attention_mask=None,
            use_cache=False,
            position_ids=state["position_ids"],
            **state["block_kwargs"],
        )
        return {**state, "hidden_states": hidden_states}


class Suffix(HeadAndLoss):
    """Last layer."""

    output_class = CausalLMOutputWithCrossAttentions


def cut(model: PreTrainedModel) -> Cut:
    """Every block attends to all that came before."""
    backbone: Any = model.transformer
    return assemble(
        model,
        Prefix(backbone),
        [Block(block) for block in backbone.h],
        Suffix(model, backbone.ln_f, model.lm_head),
    )
