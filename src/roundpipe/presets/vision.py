"""Models that see: the blocks of the vision tower, then those of the language model.

What comes before, between and after is the model's own forward in parts ([Note: the model's own
forward]). A family says only what its tower does after its blocks, and how many tokens an image
makes; see docs/internals/vision-language.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn
from transformers import PreTrainedModel

from . import causal_lm, decoder
from .calling import by_name, run_block
from .experts.balance import assemble, balance_of
from .images import IMAGES, Measure, Positions, Sight, images_of_rows, split_rows
from .parts import BlockCall, Blocks, Part, Seen, by_kind, path_of_blocks
from .preset import Cut, DoesNotFit
from .trial import Findings


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a preset says of its models.

    Args:
        tower: the vision tower's name in ``model.model``.
        measure: the images of a batch, or its videos.
        sights: what the tower takes, in the order in which the model runs it.
        positions: the position ids of a batch, made of all its images before it is cut; None
            leaves them to the model's forward.
        after: names of the tower's modules that run after its blocks.
        seen: ``(tower, hidden_states, kept, sizes)``, what the tower's forward returns of one kind
            of what is seen. ``tower`` has the modules of ``after``; ``kept`` the hidden states
            asked for; ``sizes`` those that the model's forward was given, if any.
        keeps: of a model, the places of hidden states that ``seen`` or the model reads: 0 before
            the first block of the tower, i after its i-th.
        takes: ``(sizes)``, what the tower's forward is given besides pixels.
        kinds: of each of the tower's blocks, which are called alike; None if all are.
        blinded: attributes that the tower has in place of its own while its blocks are called.
        between: name of a method of the language model that changes the hidden states after some
            of its blocks: ``(hidden_states, *others)``.
    """

    tower: str
    measure: Measure
    after: tuple[str, ...]
    seen: Callable[[Any, torch.Tensor, Mapping[int, torch.Tensor], torch.Tensor | None], Any]
    sights: tuple[Sight, ...] = (IMAGES,)
    positions: Positions | None = None
    keeps: Callable[[Any], list[int]] = lambda _: []
    takes: Callable[[torch.Tensor | None], dict[str, Any]] = lambda _: {}
    kinds: Callable[[Any], list[int]] | None = None
    blinded: Mapping[str, Any] | None = None
    between: str | None = None


class Looking(TypedDict):
    """What travels through the tower."""

    hidden_states: torch.Tensor | None  # None without images
    kept: dict[int, torch.Tensor]  # by place, see `Family`
    calls: tuple[BlockCall, ...]  # what else a block takes, by its kind
    named: dict[str, Any]  # what the model's forward was given, but for the pixels
    lines: dict[str, int]  # of the hidden states, by the name of the pixels that they come from
    loss_weight: float | None
    skip_logits: bool | None
    has_siblings: bool  # see `Routed`


class State(decoder.State):
    """What travels through the language model."""

    changes: tuple[tuple[Any, ...], ...]  # to the hidden states, one after each of the first blocks


class Eye(nn.Module):
    """First layer: takes the arguments of the model's forward, and has the tower begin."""

    def __init__(
        self, model: PreTrainedModel, family: Family, part: Part, kinds: list[int]
    ) -> None:
        super().__init__()
        self.part = part
        self.kinds = kinds
        self.model_class = type(model)
        self.sights = family.sights
        self.takes = family.takes
        self.keeps_first = 0 in family.keeps(model)

    def forward(
        self,
        *args: Any,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        has_siblings: bool = False,
        **kwargs: Any,
    ) -> Looking:
        named = by_name(self.model_class, args, kwargs)
        given = {
            sight: pixels
            for sight in self.sights
            if (pixels := named.pop(sight.pixels, None)) is not None
        }
        hidden_states, calls = None, tuple[BlockCall, ...]()
        if given:
            sizes = [each for sight in given if (each := named.get(sight.sizes)) is not None]
            takes = self.takes(_together(sizes) if sizes else None)
            hidden_states, noted = self.part.first(_together([*given.values()]), **takes)
            calls = by_kind(noted, self.kinds, self.model_class)
        return Looking(
            hidden_states=hidden_states,
            kept={0: hidden_states} if hidden_states is not None and self.keeps_first else {},
            calls=calls,
            named=named,
            lines={sight.pixels: len(pixels) for sight, pixels in given.items()},
            loss_weight=loss_weight,
            skip_logits=skip_logits,
            has_siblings=has_siblings,
        )


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Images and videos pass the tower in one go; each attends to itself alone."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _apart(states: torch.Tensor, lines: list[int]) -> Sequence[torch.Tensor]:
    return [states] if len(lines) == 1 else states.split(lines)


class TowerBlock(nn.Module):
    """One block of the tower. ``place``: that of what it returns, if it is read later."""

    _roundpipe_compiled_apart = ("kind", "place")

    def __init__(self, block: nn.Module, kind: int, place: int | None) -> None:
        super().__init__()
        self.block = block
        self.kind = kind
        self.place = place

    def forward(self, state: Looking) -> Looking:
        if state["hidden_states"] is None:
            return state
        call = state["calls"][self.kind]
        hidden_states = run_block(self.block, state["hidden_states"], *call.args, **call.kwargs)
        kept = state["kept"] if self.place is None else {**state["kept"], self.place: hidden_states}
        return {**state, "hidden_states": hidden_states, "kept": kept}


class Join(decoder.Prefix):
    """Puts what the tower has seen in place of the placeholders, and has the language model
    begin."""

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        part: Part,
        kinds: list[int],
        *,
        collects: bool,
    ) -> None:
        super().__init__(model, part, kinds, collects=collects)
        tower: Any = getattr(model.model, family.tower)
        self.after = nn.ModuleDict(
            {name: getattr(tower, name) for name in family.after if hasattr(tower, name)}
        )
        self.family = family
        self.original = (tower,)  # in a tuple, because it must not be registered

    def forward(self, state: Looking) -> State:  # type: ignore[override]
        family, hidden_states = self.family, state["hidden_states"]
        named, changes = dict(state["named"]), list[tuple[Any, ...]]()
        stand_ins: dict[str, Any] = {}
        if hidden_states is not None:
            seen, lines = [], [*state["lines"].values()]
            parts = _apart(hidden_states, lines)
            kept = {place: _apart(each, lines) for place, each in state["kept"].items()}
            given = [sight for sight in family.sights if sight.pixels in state["lines"]]
            for at, (sight, part) in enumerate(zip(given, parts, strict=True)):
                at_places = {place: each[at] for place, each in kept.items()}
                seen.append(family.seen(self.after, part, at_places, named.get(sight.sizes)))
                named[sight.pixels] = hidden_states.detach()  # of which only the type is read
            stand_ins["instead"] = {
                f"model.{family.tower}": Seen(iter(seen).__next__, *self.original)
            }
        if family.between is not None:

            def note(hidden_states: torch.Tensor, *others: Any) -> torch.Tensor:
                changes.append(others)
                return hidden_states

            stand_ins["attributes"] = {family.between: note}
        made = self.begin(
            named,
            state["loss_weight"],
            state["skip_logits"],
            has_siblings=state["has_siblings"],
            **stand_ins,
        )
        return State(**made, changes=tuple(changes))


class ChangedBlock(nn.Module):
    """One of the language model's blocks, after which the model changes its hidden states."""

    def __init__(self, layer: nn.Module, change: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.change = change

    def forward(self, state: State) -> State:
        made: State = self.layer(state)
        if not made["changes"]:
            return made
        (others, *later), hidden_states = made["changes"], made["hidden_states"]
        changed = self.change(None, hidden_states, *others)
        return {**made, "hidden_states": changed, "changes": tuple(later)}


def cut(model: PreTrainedModel, family: Family) -> Cut:
    """Cuts a model with a tower, and tries the language model as the generic preset does.

    Raises:
        DoesNotFit: the tower or the language model is not of this shape.
    """
    inner: Any = model.model
    path = ("model", "language_model", *path_of_blocks(inner.language_model))
    return decoder.cut(model, path, partial(_make, family))


def _make(
    family: Family,
    model: PreTrainedModel,
    found: Findings,
    blocks: list[nn.Module],
    kinds: list[int],
) -> Cut:
    inner: Any = model.model
    tower = getattr(inner, family.tower)
    path, keeps = path_of_blocks(tower), family.keeps(model)
    looking = list(tower.get_submodule(".".join(path)).children())
    alike = family.kinds(model) if family.kinds is not None else [0] * len(looking)
    eye = Part(tower, Blocks(path, len(looking), None), lambda name: name not in family.after)
    eye.attributes = dict(family.blinded or {})
    only_last = _names(found.last) - _names(found.first)
    joined = Part(
        model,
        found.first.blocks,
        lambda name: name != f"model.{family.tower}" and name not in only_last,
    )
    # Left by a generation, they would shift the positions.
    joined.attributes = found.last.attributes = {"rope_deltas": None}
    balance = balance_of(model, blocks)
    layers: list[nn.Module] = list(decoder.blocks_of(model, blocks, kinds))
    if family.between is not None:
        if len(keeps) >= len(layers):
            raise DoesNotFit(
                f"features of {len(keeps)} depths are added after its {len(layers)} blocks"
            )
        change = getattr(type(inner.language_model), family.between)
        for index in range(len(keeps)):
            layers[index] = ChangedBlock(layers[index], change)
    cutting = partial(split_rows, family.measure, family.positions, family.sights)
    return assemble(
        model,
        Eye(model, family, eye, alike),
        [
            *(
                TowerBlock(block, kind, place if place in keeps else None)
                for place, (block, kind) in enumerate(zip(looking, alike, strict=True), 1)
            ),
            Join(model, family, joined, kinds, collects=balance is not None),
            *layers,
        ],
        decoder.Suffix(model, found, balance),
        balance,
        check=partial(_check, family),
        split_rows=cutting,
    )


def _check(
    family: Family, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    causal_lm.refuse_unread(model, args, kwargs)
    named = by_name(type(model), args, kwargs)
    for sight in family.sights:
        images_of_rows(model, named, family.measure, sight)


def _names(part: Part) -> set[str]:
    """From the model on."""
    return {
        ".".join((*part.blocks.path[:depth], name))
        for depth, owned in enumerate(part.owned)
        for name, _ in owned.named_children()
    }
