"""T5 and mT5 for text to text: the encoder's blocks, then the decoder's, as one sequence.

Bit-exact against ``T5ForConditionalGeneration.forward`` without a cache. What the encoder has made
travels with the decoder's hidden states from layer to layer, and carries a gradient back. Position
biases do not travel, because one is (heads, queries, keys) large and carries a gradient as well:
each block makes its own from the table that its stack's first block has, which all blocks of the
stack share.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import Seq2SeqLMOutput

from ..calling import refuse_cache, refuse_encoder_outputs, refuse_unsupported, run_block
from ..causal_lm import wants_only_loss
from ..loss import weighted
from ..preset import Cut
from .encoder_decoder import UNREAD, assemble

_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")


class State(TypedDict):
    """It travels from layer to layer. ``hidden_states`` and ``encoded`` carry gradients."""

    hidden_states: torch.Tensor  # (rows, tokens, hidden), of the stack that runs
    mask: Any  # of self-attention, what the attention implementation takes
    encoded: torch.Tensor | None  # (rows, source tokens, hidden), once the encoder is through
    cross_mask: Any
    source_mask: torch.Tensor | None  # (rows, source tokens)
    of_decoder: dict[str, torch.Tensor | None]  # what its forward takes, until it begins
    labels: torch.Tensor | None
    loss_weight: float | None  # see loss.py
    skip_logits: bool | None  # see causal_lm.py
    block_kwargs: dict[str, Any]


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.embed_tokens = encoder.embed_tokens
        self.dropout = encoder.dropout
        self.config = encoder.config

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> State:
        refuse_cache(kwargs)
        refuse_unsupported(self.config, kwargs)
        refuse_encoder_outputs(kwargs)
        embeds = _embedded(self.embed_tokens, input_ids, inputs_embeds)
        of_decoder = {name: kwargs.pop(name, None) for name in _OF_DECODER}
        for name in UNREAD:
            kwargs.pop(name, None)
        return State(
            hidden_states=self.dropout(embeds),
            mask=create_bidirectional_mask(
                config=self.config, inputs_embeds=embeds, attention_mask=attention_mask
            ),
            encoded=None,
            cross_mask=None,
            source_mask=attention_mask,
            of_decoder=of_decoder,
            labels=labels,
            loss_weight=loss_weight,
            skip_logits=skip_logits,
            block_kwargs=kwargs,
        )


class Block(nn.Module):
    """A block of either stack, whose ``first`` one has the table of relative positions."""

    def __init__(self, block: Any, first: Any) -> None:
        super().__init__()
        attention = first.layer[0].SelfAttention
        self.block = block
        self.table = attention.relative_attention_bias
        self.attention_class = type(attention)
        self.how = {
            "is_decoder": attention.is_decoder,
            "relative_attention_num_buckets": attention.relative_attention_num_buckets,
            "relative_attention_max_distance": attention.relative_attention_max_distance,
            "_relative_position_bucket": attention._relative_position_bucket,
        }

    def forward(self, state: State) -> State:
        hidden_states = run_block(
            self.block,
            state["hidden_states"],
            state["mask"],
            self._bias(state["hidden_states"]),
            state["encoded"],
            state["cross_mask"],
            **state["block_kwargs"],
        )
        return {**state, "hidden_states": hidden_states}

    def _bias(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the bias that the first block would make, to the bit: (1, heads, tokens, tokens).
        Made here for that one too, because what is compiled is then the same for all."""
        tokens, attention = hidden_states.shape[1], self.attention_class
        stands_in = SimpleNamespace(**self.how, relative_attention_bias=self.table)
        made: torch.Tensor = attention.compute_bias(
            stands_in, tokens, tokens, device=hidden_states.device
        )
        return made


class Bridge(nn.Module):
    """Ends the encoder, and does before the decoder's blocks what its forward does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.encoder.final_layer_norm
        self.dropout_of_encoder = model.encoder.dropout
        self.embed_tokens = model.decoder.embed_tokens
        self.dropout = model.decoder.dropout
        self.config = model.decoder.config
        self.shift_right = partial(type(model)._shift_right, SimpleNamespace(config=model.config))

    def forward(self, state: State) -> State:
        encoded = self.dropout_of_encoder(self.norm(state["hidden_states"]))
        ids, embeds, mask = (state["of_decoder"][name] for name in _OF_DECODER)
        if state["labels"] is not None and ids is None and embeds is None:
            ids = self.shift_right(state["labels"])
        embeds = _embedded(self.embed_tokens, ids, embeds, "decoder_")
        return {
            **state,
            "hidden_states": self.dropout(embeds),
            "mask": create_causal_mask(self.config, embeds, mask, None),
            "encoded": encoded,
            "cross_mask": create_bidirectional_mask(
                config=self.config,
                inputs_embeds=embeds,
                attention_mask=state["source_mask"],
                encoder_hidden_states=encoded,
            ),
            "of_decoder": {},
        }


class Suffix(nn.Module):
    """Last layer: the decoder's norm, the head, and the loss when labels were given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.decoder.final_layer_norm
        self.dropout = model.decoder.dropout
        self.head = model.lm_head
        self.scale = (
            model.model_dim**-0.5 if getattr(model.config, "scale_decoder_outputs", False) else None
        )

    def forward(self, state: State) -> Any:
        """Returns what the model's forward does, without its past."""
        hidden_states = self.dropout(self.norm(state["hidden_states"]))
        if self.scale is not None:
            hidden_states = hidden_states * self.scale
        logits, labels = self.head(hidden_states), state["labels"]
        encoded: Any = state["encoded"]
        made: Any = partial(Seq2SeqLMOutput, encoder_last_hidden_state=encoded)
        if labels is None:
            return made(logits=logits)
        loss: Any = weighted(
            logits,
            state["loss_weight"],
            lambda: nn.functional.cross_entropy(
                logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100
            ),
        )
        return (
            Seq2SeqLMOutput(loss=loss)
            if wants_only_loss(state["skip_logits"])
            else made(loss=loss, logits=logits)
        )


def _embedded(
    embed: nn.Module, ids: torch.Tensor | None, embeds: torch.Tensor | None, of: str = ""
) -> torch.Tensor:
    if (ids is None) == (embeds is None):
        raise ValueError(f"You must specify exactly one of {of}input_ids or {of}inputs_embeds")
    made: torch.Tensor = embed(ids) if embeds is None else embeds
    return made


def cut(model: PreTrainedModel) -> Cut:
    """Embeddings, one layer per block of the encoder, what is between, one per block of the
    decoder, head."""
    stacks: Any = model
    encoder, decoder = (
        [Block(block, stack.block[0]) for block in stack.block]
        for stack in (stacks.encoder, stacks.decoder)
    )
    return assemble(
        model, Prefix(stacks.encoder), *encoder, Bridge(stacks), *decoder, Suffix(stacks)
    )
