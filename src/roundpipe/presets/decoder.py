"""Any other Hugging Face causal language model: found out from its parts, and checked against its
own forward.

The embeddings are what the model calls its input embeddings, the blocks the one list of modules
that may not be split between devices (``_no_split_modules``). The first and last layer run the
model's own forward in parts ([Note: the model's own forward]), so nothing about the architecture is
guessed. Whether that gives the model's logits and loss is tried out on a few tokens when the model
is cut; where it does not, the model has no preset, and the log says why.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import ConfigError
from . import trial
from .calling import by_name, note_lengths, refuse_cache, refuse_unsupported, run_block
from .causal_lm import Readout, assemble, wants_only_loss
from .loss import Loss, chunked, is_plain_linear, weighted
from .parts import BlockCall, Blocks, Part
from .preset import Cut, DoesNotFit
from .routing import KeptChoice, wants_auxiliary_loss

# Describe the tokens, which are hidden states by the time the last part runs.
_OF_TOKENS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "past_key_values",
    # of models with images
    "pixel_values",
    "image_grid_thw",
    "image_sizes",
    "mm_token_type_ids",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)


MakeCut = Callable[[PreTrainedModel, trial.Findings, list[nn.Module], list[int]], Cut]


class State(TypedDict):
    """What travels from layer to layer."""

    hidden_states: torch.Tensor  # (rows, tokens, hidden)
    calls: tuple[BlockCall, ...]  # what else a block takes, by its kind
    labels: torch.Tensor | None
    last_kwargs: dict[str, Any]  # of the last part: logits_to_keep, ...
    loss_weight: float | None  # see loss.py
    skip_logits: bool | None  # see `wants_only_loss`
    readout: Readout | None  # see `HeadAndLoss`


class Readable(NamedTuple):
    """What a readout gets of a last layer."""

    config: Any
    head: nn.Module


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward. ``kinds``: of each block, which are
    called alike."""

    def __init__(self, model: PreTrainedModel, part: Part, kinds: list[int]) -> None:
        super().__init__()
        self.part = part
        self.kinds = kinds
        self.config = model.config
        self.model_class = type(model)

    def forward(
        self,
        *args: Any,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> State:
        return self.begin(by_name(self.model_class, args, kwargs), loss_weight, skip_logits)

    def begin(
        self,
        named: dict[str, Any],
        loss_weight: float | None,
        skip_logits: bool | None,
        **stand_ins: Any,
    ) -> State:
        """The state that the first block gets. ``stand_ins``: see `Part.first`."""
        refuse_cache(named.get("past_key_values"), named.pop("use_cache", None))
        refuse_unsupported(self.config, named)
        if wants_auxiliary_loss(self.config, named.get("output_router_logits")):
            raise ConfigError(
                "output_router_logits: there is no preset that collects them for "
                f"{self.model_class.__name__}"
            )
        if named.get("is_causal") is not None:
            raise ConfigError(
                "is_causal: transformers carries it in the config, which all microbatches share; "
                "set it there"
            )
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
            readout=readout,
        )


def by_kind(calls: list[BlockCall], kinds: list[int], model_class: type) -> tuple[BlockCall, ...]:
    """One call for each kind: shipped once, though many blocks are called with the same mask.

    Raises:
        ConfigError: blocks of one kind are called with different things.
    """
    first = [calls[kinds.index(kind)] for kind in range(max(kinds) + 1)]
    for index, (call, kind) in enumerate(zip(calls, kinds, strict=True)):
        if not _are_same(call, first[kind]):
            raise ConfigError(
                f"block {index} of {model_class.__name__} takes other arguments than block "
                f"{kinds.index(kind)} in this batch, and took the same when the model was wrapped; "
                "pass use_sequential_preset=False"
            )
    return tuple(first)


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, block: nn.Module, kind: int) -> None:
        super().__init__()
        self.block = block
        self.kind = kind

    def forward(self, state: State) -> State:
        call = state["calls"][self.kind]
        output = run_block(self.block, state["hidden_states"], *call.args, **call.kwargs)
        return {**state, "hidden_states": output[0] if isinstance(output, tuple) else output}


class RoutedBlock(Block):
    """One decoder block that may have experts."""

    def forward(self, state: State) -> State:
        choice = KeptChoice()
        with choice:
            made = super().forward(state)
        choice.save()
        return made


class Suffix(nn.Module):
    """Last layer: returns what the model's forward returns.

    ``head``: name of the head in the model if its logits go to the loss as they are; else None.
    """

    def __init__(
        self, model: PreTrainedModel, part: Part, head: str | None, output_class: type[Any]
    ) -> None:
        super().__init__()
        self.part = part
        self.head = head
        self.output_class = output_class
        self.config = model.config
        self.width = trial.width_of(model)
        self.loss = Loss(model)

    def forward(self, state: State) -> Any:
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
    if wants_auxiliary_loss(model.config, None):
        raise DoesNotFit(
            "its config asks for output_router_logits, which only presets of their own collect"
        )
    path = path or path_of_blocks(model)
    blocks = list(model.get_submodule(".".join(path)).children())
    with trial.in_evaluation(model):
        try:
            made = _cut_at(model, path, blocks, make or _make)
        except DoesNotFit:
            raise
        except (
            Exception
        ) as error:  # because an unknown forward may raise anything when called in another way
            raise DoesNotFit(
                f"run in parts, its forward raises {type(error).__name__}: {error}"
            ) from error
    reached = {id(parameter) for parameter in made.sequential.parameters()}
    left_out = [
        name for name, parameter in model.named_parameters() if id(parameter) not in reached
    ]
    if left_out:
        raise DoesNotFit(
            f"its forward does not reach {len(left_out)} parameters, {left_out[0]} among them"
        )
    return made


def _cut_at(
    model: PreTrainedModel, path: tuple[str, ...], blocks: list[nn.Module], make: MakeCut
) -> Cut:
    samples, num_returned = trial.run(model, blocks[0])
    where = Blocks(path, len(blocks), num_returned)
    trial.refuse_skipping(model, where, samples[0].inputs)
    found = trial.find(model, where, samples[0].inputs)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None)
    kinds = _kinds(found.calls, layer_types or [])
    made = make(model, found, blocks, kinds)
    trial.compare(model, made, samples)
    return made


def _make(
    model: PreTrainedModel, found: trial.Findings, blocks: list[nn.Module], kinds: list[int]
) -> Cut:
    return assemble(
        model,
        Prefix(model, found.first, kinds),
        blocks_of(model, blocks, kinds),
        Suffix(model, found.last, found.head, found.output_class),
    )


def blocks_of(model: PreTrainedModel, blocks: list[nn.Module], kinds: list[int]) -> list["Block"]:
    """The layers of the blocks, which note what routers choose if there may be some."""
    block_class = (
        RoutedBlock if "router_logits" in (type(model)._can_record_outputs or {}) else Block
    )
    return [block_class(block, kind) for block, kind in zip(blocks, kinds, strict=True)]


def path_of_blocks(model: PreTrainedModel) -> tuple[str, ...]:
    """Where the one list of modules is that transformers says may not be split."""
    classes = set(model._no_split_modules or ())
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and {type(m).__name__ for m in module} <= classes
    ]
    if len(found) != 1:
        raise DoesNotFit(
            f"it has {len(found)} lists of modules of {sorted(classes)}, where one is needed: "
            f"{found}"
        )
    return tuple(found[0].split("."))


def _kinds(calls: list[BlockCall], layer_types: Sequence[Any]) -> list[int]:
    """Numbers blocks that are called alike alike; never two of different ``layer_types``."""
    kinds: list[int] = []
    types = layer_types if len(layer_types) == len(calls) else [None] * len(calls)
    for index, call in enumerate(calls):
        alike = (k for k in range(index) if types[k] == types[index] and _are_same(call, calls[k]))
        earlier = next(alike, None)
        kinds.append(max(kinds, default=-1) + 1 if earlier is None else kinds[earlier])
    return kinds


def _are_same(call: BlockCall, other: BlockCall) -> bool:
    leaves, spec = pytree.tree_flatten(call)
    others, other_spec = pytree.tree_flatten(other)
    return spec == other_spec and all(
        a is b or (isinstance(a, bool | int | float | str) and bool(a == b))
        for a, b in zip(leaves, others, strict=True)
    )
