"""Any other Hugging Face causal language model: found out from its parts, and checked against its
own forward.

The embeddings are what the model calls its input embeddings, the blocks the one list of modules
that may not be split between devices (``_no_split_modules``). The first and last layer run the
model's own forward in parts ([Note: the model's own forward]), so nothing about the architecture is
guessed. Whether that gives the model's logits and loss is tried out on a few tokens when the model
is cut; where it does not, the model has no preset, and the log says why.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import ConfigError
from . import trial
from .calling import (
    by_name,
    note_lengths,
    refuse_cache,
    refuse_unsupported,
    row_wise_in,
    run_block,
)
from .causal_lm import LossState, wants_only_loss
from .experts.balance import Balance, assemble, balance_of, routers_in, why_unheard
from .experts.routing import Routed, chooses, keeps_choices, run_routed, wants_auxiliary_loss
from .loss import Loss, chunked, is_plain_linear, weighted
from .parts import BlockCall, Blocks, Part, by_kind, kinds_of, path_of_blocks
from .preset import Cut, DoesNotFit

# Describe the tokens, which are hidden states by the time the last part runs.
_OF_TOKENS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    # of models that see
    "pixel_values",
    "image_grid_thw",
    "image_sizes",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "mm_token_type_ids",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)


MakeCut = Callable[[PreTrainedModel, trial.Findings, list[nn.Module], list[int]], Cut]


class State(LossState, Routed):
    """This travels from layer to layer. Only ``hidden_states`` carries a gradient."""

    calls: tuple[BlockCall, ...]  # what else a block takes, by its kind


class Readable(NamedTuple):
    """What a readout gets of a last layer."""

    config: Any
    head: nn.Module


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward.

    ``part``: a module with `Part.first`. ``kinds``: of each block, which are called alike.
    ``collects``: blocks collect what routers say.
    """

    def __init__(
        self, model: PreTrainedModel, part: Any, kinds: list[int], *, collects: bool = False
    ) -> None:
        super().__init__()
        self.collects = collects
        self.part = part
        self.kinds = kinds
        self.config = model.config
        self.model_class = type(model)

    def forward(
        self,
        *args: Any,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        has_siblings: bool = False,
        **kwargs: Any,
    ) -> State:
        named = by_name(self.model_class, args, kwargs)
        return self.begin(named, loss_weight, skip_logits, has_siblings=has_siblings)

    def begin(
        self,
        named: dict[str, Any],
        loss_weight: float | None,
        skip_logits: bool | None,
        *,
        has_siblings: bool = False,
        **stand_ins: Any,
    ) -> State:
        """The state that the first block gets. ``stand_ins``: see `Part.first`."""
        refuse_cache(named)
        refuse_unsupported(self.config, named)
        asked = named.get("output_router_logits")
        wanted = wants_auxiliary_loss(self.model_class, self.config, asked)
        if wanted and not self.collects:
            raise ConfigError(
                f"output_router_logits: what routers of {self.model_class.__name__} say is not "
                "understood, so the auxiliary loss cannot be made; leave it out"
            )
        if self.collects:
            named["output_router_logits"] = False  # because the blocks collect them
        readout = named.pop("readout", None)
        hidden_states, calls = self.part.first(**named, use_cache=False, **stand_ins)
        note_lengths(self.part)
        return State(
            hidden_states=hidden_states,
            calls=by_kind(calls, self.kinds, self.model_class),
            labels=named.pop("labels", None),
            last_kwargs={name: value for name, value in named.items() if name not in _OF_TOKENS},
            loss_weight=loss_weight,
            skip_logits=skip_logits,
            router_logits=() if wanted else None,
            attention_mask=named.get("attention_mask") if wanted else None,
            has_siblings=has_siblings,
            readout=readout,
        )


class Block(nn.Module):
    """One decoder block."""

    _roundpipe_compiled_apart = ("kind",)

    def __init__(self, block: nn.Module, kind: int) -> None:
        super().__init__()
        self.block = block
        self.kind = kind
        self.row_wise = row_wise_in(self)

    def forward(self, state: State) -> State:
        call = state["calls"][self.kind]
        hidden_states = run_block(self.block, state["hidden_states"], *call.args, **call.kwargs)
        return {**state, "hidden_states": hidden_states}


class RoutedBlock(Block):
    """One decoder block that may have experts. ``router``: where its router is, if it has one."""

    def __init__(self, block: nn.Module, kind: int, router: str | None) -> None:
        super().__init__(block, kind)
        self.router = router

    @keeps_choices
    def forward(
        self, state: State, kept: tuple[torch.Tensor, ...] | None
    ) -> tuple[State, tuple[torch.Tensor, ...]]:
        return run_routed(super().forward, state, self.block, self.router, kept)


class Suffix(nn.Module):
    """Last layer: returns what the model's forward returns.

    ``found``: of the model's forward in parts; its ``head`` is None unless logits go to the loss as
    they are. ``balance``: makes the auxiliary loss, if the routers can be listened to.
    """

    def __init__(
        self, model: PreTrainedModel, found: trial.Findings, balance: Balance | None = None
    ) -> None:
        super().__init__()
        self.balance = balance
        self.part = found.last
        self.head = found.head
        self.output_class = found.output_class
        self.config = model.config
        self.width = trial.width_of(model)
        self.loss = Loss(model)

    def forward(self, state: State) -> Any:
        """What the model's forward returns."""
        output = self._output(state)
        return output if self.balance is None else self.balance.added(output, state)

    def _output(self, state: State) -> Any:
        hidden_states, named, labels = (
            state["hidden_states"],
            dict(state["last_kwargs"]),
            state["labels"],
        )
        named["inputs_embeds"] = hidden_states.new_zeros(1, 1, 1).expand(
            *hidden_states.shape[:2], self.width
        )
        if state["readout"] is not None:
            if self.head is None:
                raise ConfigError("readout: there is no head whose outputs are the model's logits")
            kept = self.part.into(self.head, hidden_states, use_cache=False, **named)
            read = Readable(self.config, self.part.owned[0].get_submodule(self.head))
            return state["readout"](read, kept, labels)
        if labels is None:
            return self.part.last(hidden_states, use_cache=False, **named)
        skips = wants_only_loss(state["skip_logits"])
        if skips and self.head is not None and self.loss.is_token_mean():
            head = self.part.owned[0].get_submodule(self.head)
            if is_plain_linear(head):
                kept = self.part.into(self.head, hidden_states, use_cache=False, **named)
                return self.output_class(loss=chunked(kept, head, labels, named))
        output = self.part.last(hidden_states, labels=labels, use_cache=False, **named)
        output.loss = weighted(output.logits, state["loss_weight"], lambda: output.loss)
        return self.output_class(loss=output.loss) if skips else output


def is_causal_lm(model: nn.Module) -> bool:
    """Whether transformers counts the class, or one it is made from, among causal language
    models."""
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return isinstance(model, PreTrainedModel) and any(
        cls.__name__ in names for cls in type(model).__mro__
    )


def cut(
    model: PreTrainedModel, path: tuple[str, ...] | None = None, make: MakeCut | None = None
) -> Cut:
    """Cuts ``model`` and tries the result.

    Args:
        path: names of attributes from the model to its list of blocks; None looks for it.
        make: ``(model, findings, blocks, kinds)``, makes the layers; None for those of this file.

    Raises:
        DoesNotFit: the model is not of this shape, or its own forward gives something else.
    """
    path = path or path_of_blocks(model)
    blocks = list(model.get_submodule(".".join(path)).children())
    balance = balance_of(model, blocks)
    asks = wants_auxiliary_loss(type(model), model.config, None)
    if balance is None and asks:
        raise DoesNotFit(
            "its config asks for output_router_logits, and what its routers say is not understood: "
            f"{why_unheard(model, blocks)}"
        )
    if make is not None:  # which makes one itself, that is tried where the config asks for it
        balance = None
    with trial.in_evaluation(model):
        try:
            made = _tried(model, path, blocks, balance, make)
        except DoesNotFit:
            if balance is None or asks:
                raise
            made = _tried(model, path, blocks, None, make)
    trial.refuse_unreached(model, made)
    return made


def _tried(
    model: PreTrainedModel,
    path: tuple[str, ...],
    blocks: list[nn.Module],
    balance: Balance | None,
    make: MakeCut | None,
) -> Cut:
    with trial.of_unknown_code():
        return _cut_at(model, path, blocks, balance, make or partial(_make, balance))


def _cut_at(
    model: PreTrainedModel,
    path: tuple[str, ...],
    blocks: list[nn.Module],
    balance: Balance | None,
    make: MakeCut,
) -> Cut:
    more = {} if balance is None else {"output_router_logits": True}
    batches = [inputs | more for inputs in trial.batches_of_tokens(model)]
    samples, (num_returned,) = trial.run(model, blocks[:1], batches)
    where, inputs = Blocks(path, len(blocks), num_returned), samples[0].inputs
    everything = Part(model, where, lambda _: True)
    trial.refuse_skipping(model, partial(everything.first, **inputs, use_cache=False))
    found = trial.find(model, where, inputs)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None)
    kinds = kinds_of(found.calls, layer_types or [])
    made = make(model, found, blocks, kinds)
    trial.compare(model, made, samples)
    return made


def _make(
    balance: Balance | None,
    model: PreTrainedModel,
    found: trial.Findings,
    blocks: list[nn.Module],
    kinds: list[int],
) -> Cut:
    first = Prefix(model, found.first, kinds, collects=balance is not None)
    made, last = blocks_of(model, blocks, kinds), Suffix(model, found, balance)
    return assemble(model, first, made, last, balance)


def blocks_of(model: PreTrainedModel, blocks: list[nn.Module], kinds: list[int]) -> list["Block"]:
    """The layers of the blocks, which note what routers choose where there may be some."""
    return [
        RoutedBlock(block, kind, next(iter(routers_in(model, block)), None))
        if chooses(block)
        else Block(block, kind)
        for block, kind in zip(blocks, kinds, strict=True)
    ]


def collects_router_logits(model: PreTrainedModel, language_model: Any = None) -> bool:
    """Whether a model of any architecture says in transformers' way what its routers return and
    what an auxiliary loss is made of. ``language_model``: where its blocks are, if not all are."""
    decoder = model if language_model is None else language_model
    try:
        path = path_of_blocks(decoder)
    except DoesNotFit:
        return False
    return balance_of(model, decoder.get_submodule(".".join(path)).children()) is not None
