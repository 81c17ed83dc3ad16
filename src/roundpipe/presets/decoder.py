"""Any other Hugging Face causal language model: found out from its parts, and checked against its
own forward.

The embeddings are what the model calls its input embeddings, the blocks the one list of modules
that may not be split between devices (``_no_split_modules``). The first and last layer run the
model's own forward in parts ([Note: the model's own forward]), so nothing about the architecture is
guessed. Whether that gives the model's logits and loss is tried out on a few tokens when the model
is cut; where it does not, the model has no preset, and the log says why.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import ConfigError
from . import trial
from .balance import Balance, assemble_routed, balance_of, routers_in
from .calling import by_name, note_lengths, refuse_cache, refuse_unsupported, run_block
from .causal_lm import assemble, wants_only_loss
from .loss import Loss, chunked, is_plain_linear, weighted
from .parts import BlockCall, Blocks, Part
from .preset import Cut, DoesNotFit
from .routing import Routed, chooses, run_routed, wants_auxiliary_loss

# Describe the tokens, which are hidden states by the time the last part runs.
_OF_TOKENS = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "past_key_values",
)


class State(Routed):
    """What travels from layer to layer."""

    hidden_states: torch.Tensor  # (rows, tokens, hidden)
    calls: tuple[BlockCall, ...]  # what else a block takes, by its kind
    labels: torch.Tensor | None
    last_kwargs: dict[str, Any]  # of the last part: logits_to_keep, ...
    loss_weight: float | None  # see loss.py
    skip_logits: bool | None  # see `wants_only_loss`


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward. ``kinds``: of each block, which are
    called alike. ``collects``: blocks collect what routers say."""

    def __init__(
        self, model: PreTrainedModel, part: Part, kinds: list[int], *, collects: bool
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
        refuse_cache(named.get("past_key_values"), named.pop("use_cache", None))
        refuse_unsupported(self.config, named)
        wanted = wants_auxiliary_loss(self.config, named.get("output_router_logits"))
        if wanted and not self.collects:
            raise ConfigError(
                "output_router_logits: there is no preset that collects them for "
                f"{self.model_class.__name__}"
            )
        if named.get("is_causal") is not None:
            raise ConfigError(
                "is_causal: transformers carries it in the config, which all microbatches share; "
                "set it there"
            )
        if self.collects:
            named["output_router_logits"] = False  # because the blocks collect them
        hidden_states, calls = self.part.first(**named, use_cache=False)
        note_lengths(self.part)
        return State(
            hidden_states=hidden_states,
            calls=self._by_kind(calls),
            labels=named.pop("labels", None),
            last_kwargs={name: value for name, value in named.items() if name not in _OF_TOKENS},
            loss_weight=loss_weight,
            skip_logits=skip_logits,
            router_logits=() if wanted else None,
            attention_mask=named.get("attention_mask") if wanted else None,
            has_siblings=has_siblings,
        )

    def _by_kind(self, calls: list[BlockCall]) -> tuple[BlockCall, ...]:
        """One call for each kind: shipped once, though many blocks are called with the same
        mask."""
        first = [calls[self.kinds.index(kind)] for kind in range(max(self.kinds) + 1)]
        for index, (call, kind) in enumerate(zip(calls, self.kinds, strict=True)):
            if not _are_same(call, first[kind]):
                raise ConfigError(
                    f"block {index} of {self.model_class.__name__} takes other arguments than "
                    "block "
                    f"{self.kinds.index(kind)} in this batch, and took the same when the model was "
                    "wrapped; pass "
                    "use_sequential_preset=False"
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
    """One decoder block that may have experts. ``router``: where its router is, if it has one."""

    def __init__(self, block: nn.Module, kind: int, router: str | None) -> None:
        super().__init__(block, kind)
        self.router = router

    def forward(self, state: State) -> State:
        made: State = run_routed(super().forward, state, self.block, self.router)
        return made


class Suffix(nn.Module):
    """Last layer: returns what the model's forward returns.

    ``head``: name of the head in the model if its logits go to the loss as they are; else None.
    ``balance``: makes the auxiliary loss, if the routers can be listened to.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        part: Part,
        head: str | None,
        output_class: type[Any],
        balance: Balance | None,
    ) -> None:
        super().__init__()
        self.balance = balance
        self.part = part
        self.head = head
        self.output_class = output_class
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


def cut(model: PreTrainedModel) -> Cut:
    """Cuts ``model`` and tries the result.

    Raises:
        DoesNotFit: the model is not of this shape, or its own forward gives something else.
    """
    path = _path_of_blocks(model)
    blocks = list(model.get_submodule(".".join(path)).children())
    balance, asks = balance_of(model, blocks), wants_auxiliary_loss(model.config, None)
    if balance is None and asks:
        raise DoesNotFit(
            "its config asks for output_router_logits, and what its routers say is not understood"
        )
    with trial.in_evaluation(model):
        try:
            made = _tried(model, path, blocks, balance)
        except DoesNotFit:
            if balance is None or asks:
                raise
            made = _tried(model, path, blocks, None)
    reached = {id(parameter) for parameter in made.sequential.parameters()}
    left_out = [
        name for name, parameter in model.named_parameters() if id(parameter) not in reached
    ]
    if left_out:
        raise DoesNotFit(
            f"its forward does not reach {len(left_out)} parameters, {left_out[0]} among them"
        )
    return made


def _tried(
    model: PreTrainedModel,
    path: tuple[str, ...],
    blocks: list[nn.Module],
    balance: Balance | None,
) -> Cut:
    try:
        return _cut_at(model, path, blocks, balance)
    except DoesNotFit:
        raise
    # Because an unknown forward may raise anything when called in another way.
    except Exception as error:
        raise DoesNotFit(
            f"run in parts, its forward raises {type(error).__name__}: {error}"
        ) from error


def _cut_at(
    model: PreTrainedModel,
    path: tuple[str, ...],
    blocks: list[nn.Module],
    balance: Balance | None,
) -> Cut:
    samples, num_returned = trial.run(
        model, blocks[0], {} if balance is None else {"output_router_logits": True}
    )
    where = Blocks(path, len(blocks), num_returned)
    trial.refuse_skipping(model, where, samples[0].inputs)
    found = trial.find(model, where, samples[0].inputs)
    kinds = _kinds(found.calls, getattr(model.config, "layer_types", None) or [])
    first = Prefix(model, found.first, kinds, collects=balance is not None)
    made_blocks = [
        RoutedBlock(block, kind, next(iter(routers_in(model, block)), None))
        if chooses(block)
        else Block(block, kind)
        for block, kind in zip(blocks, kinds, strict=True)
    ]
    last = Suffix(model, found.last, found.head, type(samples[0].output), balance)
    if balance is None:
        made = assemble(model, first, made_blocks, last)
    else:
        made = assemble_routed(model, first, made_blocks, last, balance)
    trial.compare(model, made, samples)
    return made


def collects_router_logits(model: PreTrainedModel) -> bool:
    """Whether a model of any architecture says in transformers' way what its routers return and
    what an auxiliary loss is made of."""
    try:
        path = _path_of_blocks(model)
    except DoesNotFit:
        return False
    return balance_of(model, model.get_submodule(".".join(path)).children()) is not None


def _path_of_blocks(model: PreTrainedModel) -> tuple[str, ...]:
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
