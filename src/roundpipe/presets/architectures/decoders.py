"""Decoders of which it is written down what comes before their blocks: Llama and those of its shape
(Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, GPT-OSS), and GPT-2.

Bit-exact against the models' own forward without a cache, which need not be run to cut a model. It
is the generic preset's but for the first part, which does not look for documents in positions that
it makes itself, and the last, which runs the norm and the head alone. Experts' weights are stacked,
(experts, ...) per matrix, as transformers keeps them: one parameter each, uploaded with its block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
)

from ...errors import ConfigError
from ..calling import causal_config
from ..causal_lm import HeadAndLoss
from ..decoder import Prefix, blocks_of
from ..experts.balance import assemble, balance_of
from ..parts import BlockCall
from ..preset import Cut

_MASKS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}
# What blocks do not read; compiled ones would recompile for it.
_OF_THE_LAST = (
    "labels",
    "logits_to_keep",
    "output_router_logits",
    "num_items_in_batch",
    "shift_labels",
    "ignore_index",
)


class Opening(nn.Module):
    """Embeddings, masks and rotary come before the blocks of ``backbone``. ``kinds``: of each
    block, how it attends. ``knows_documents``: masks keep those apart whose positions restart."""

    def __init__(self, backbone: Any, kinds: list[str], *, knows_documents: bool = True) -> None:
        super().__init__()
        self.config = backbone.config
        self.kinds = kinds
        self.knows_documents = knows_documents
        self._own(backbone)

    def _own(self, backbone: Any) -> None:
        self.embed_tokens = backbone.embed_tokens
        self.rotary_emb = backbone.rotary_emb

    def first(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, list[BlockCall]]:
        """Hidden states, and what each block is called with: one call for all of a kind."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        others = {name: value for name, value in kwargs.items() if name not in _OF_THE_LAST}
        masks: Any = attention_mask
        if not isinstance(attention_mask, dict):  # made by the caller already
            config = causal_config(self.config, others)
            masks = {
                kind: _MASKS[kind](
                    config,
                    embeds,
                    attention_mask,
                    None,  # no cache, which releases of transformers call differently
                    position_ids=position_ids if self.knows_documents else None,
                )
                for kind in set(self.kinds)
            }
        # After the masks: positions we make ourselves never restart, and looking for restarts waits
        # for the device.
        if position_ids is None:
            position_ids = torch.arange(embeds.shape[1], device=embeds.device).unsqueeze(0)
        hidden_states, call = self._placed(embeds, position_ids, others)
        calls = {kind: call(masks[kind]) for kind in set(self.kinds)}
        return hidden_states, [calls[kind] for kind in self.kinds]

    def _placed(
        self, embeds: torch.Tensor, position_ids: torch.Tensor, others: dict[str, Any]
    ) -> tuple[torch.Tensor, Callable[[Any], BlockCall]]:
        """Hidden states at these positions, and how a block is called with its mask."""
        more = {
            **others,
            "position_embeddings": self.rotary_emb(embeds, position_ids=position_ids),
            "position_ids": position_ids,
        }
        return embeds, lambda mask: BlockCall((), {**more, "attention_mask": mask})


class OpeningOfGPT2(Opening):
    """Learnt positions, and types of tokens, are added to the embeddings."""

    def _own(self, backbone: Any) -> None:
        self.embed_tokens = backbone.wte
        self.wpe = backbone.wpe
        self.drop = backbone.drop

    def _placed(
        self, embeds: torch.Tensor, position_ids: torch.Tensor, others: dict[str, Any]
    ) -> tuple[torch.Tensor, Callable[[Any], BlockCall]]:
        for name in ("encoder_hidden_states", "encoder_attention_mask"):
            if others.pop(name, None) is not None:
                raise ConfigError(
                    f"{name}: GPT-2 runs as a decoder only in the pipeline; leave it out"
                )
        types = others.pop("token_type_ids", None)
        hidden_states = embeds + self.wpe(position_ids)
        if types is not None:
            hidden_states = hidden_states + self.embed_tokens(types)
        more = {**others, "encoder_attention_mask": None, "position_ids": position_ids}
        return self.drop(hidden_states), lambda mask: BlockCall((None, mask, None), more)


def _all_before(config: Any) -> list[str]:
    return ["full_attention"] * config.num_hidden_layers


def _one_window(config: Any) -> list[str]:
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def _by_block(config: Any) -> list[str]:
    """There may be more than blocks: a config keeps them when its number of blocks is lowered."""
    return list(config.layer_types)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """An architecture says of itself how each block attends, and where parts are."""

    kinds: Callable[[Any], list[str]] = _by_block
    backbone: str = "model"
    blocks: str = "layers"
    norm: str = "norm"
    opening: Callable[..., Opening] = Opening
    output_class: type[Any] = CausalLMOutputWithPast

    def __call__(self, model: PreTrainedModel) -> Cut:
        """Cuts a model of the architecture."""
        backbone: Any = getattr(model, self.backbone)
        blocks = list(getattr(backbone, self.blocks)[: model.config.num_hidden_layers])
        attends = self.kinds(model.config)[: len(blocks)]
        numbered = list(dict.fromkeys(attends))
        kinds = [numbered.index(kind) for kind in attends]
        balance = balance_of(model, blocks)
        part, norm = self.opening(backbone, attends), getattr(backbone, self.norm)
        return assemble(
            model,
            Prefix(model, part, kinds, collects=balance is not None),
            blocks_of(model, blocks, kinds),
            HeadAndLoss(model, norm, self.output_class, balance),
            balance,
        )


llama = Decoder(kinds=_all_before)
mistral = Decoder(kinds=_one_window)
qwen = Decoder()
routed = Decoder(kinds=_one_window, output_class=MoeCausalLMOutputWithPast)
# Unlike its relatives it makes its masks without looking at ``position_ids``, so packed documents
# attend to each other, here as there; with flash kwargs (``cu_seq_lens_*``) they do not.
gpt_oss = Decoder(
    opening=partial(Opening, knows_documents=False), output_class=MoeCausalLMOutputWithPast
)
gpt2 = Decoder(
    kinds=_all_before,
    backbone="transformer",
    blocks="h",
    norm="ln_f",
    opening=OpeningOfGPT2,
    output_class=CausalLMOutputWithCrossAttentions,
)
