"""Any other Hugging Face model of an encoder and a decoder: the encoder's blocks, then the
decoder's, as one sequence, checked against the model's own forward.

The stacks are what the model calls its encoder and its decoder, their blocks the one list of
modules that each has. What comes before, between and after the blocks is the model's own forward in
parts ([Note: the model's own forward]). See docs/internals/encoder-decoder.md.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from ...errors import ConfigError
from ...microbatch import split
from .. import trial
from ..calling import (
    by_name,
    honour_return_logits,
    refuse_cache,
    refuse_encoder_outputs,
    refuse_unknown,
    refuse_unsupported,
)
from ..causal_lm import refuse_unread, wants_only_loss
from ..decoder import Block
from ..experts.routing import chooses, wants_auxiliary_loss
from ..loss import chunked, is_plain_linear, merge_outputs, weighted
from ..parts import BlockCall, Blocks, Part, Seen, by_kind, kinds_of
from ..preset import Cut, DoesNotFit, SplitForward

# By the models' own losses, which take nothing but labels.
UNREAD = ("num_items_in_batch", "shift_labels", "ignore_index")
_WHOLE = ("num_items_in_batch", "loss_weight")


class State(TypedDict):
    """It travels from layer to layer. Hidden states carry gradients, the encoder's among ``calls``
    as well."""

    hidden_states: torch.Tensor  # (rows, tokens, hidden), of the stack that runs
    calls: tuple[BlockCall, ...]  # what else a block of that stack takes, by its kind
    encoded_at: int | None  # which tensor of ``calls`` is what the encoder has made
    named: dict[str, Any]  # what the model's forward was given, but for embeddings and sounds
    shapes: dict[str, tuple[int, ...]]  # of those
    loss_weight: float | None  # see loss.py
    skip_logits: bool | None  # see causal_lm.py


class Prefix(nn.Module):
    """First layer: takes the arguments of the model's forward, up to the encoder's first block."""

    def __init__(self, model: PreTrainedModel, part: Part, kinds: list[int]) -> None:
        super().__init__()
        self.part = part
        self.kinds = kinds
        self.config = model.config
        self.model_class = type(model)
        self.dense = (model.main_input_name, "inputs_embeds")

    def forward(
        self,
        *args: Any,
        loss_weight: float | None = None,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> State:
        named = by_name(self.model_class, args, kwargs)
        refuse_cache(named)
        refuse_unsupported(self.config, named)
        refuse_encoder_outputs(named)
        asked = named.get("output_router_logits")
        if wants_auxiliary_loss(self.model_class, self.config, asked):
            raise ConfigError("output_router_logits: there is no preset that collects them")
        if self.training and _augments(self.config):
            raise ConfigError(
                "apply_spec_augment was switched on after the model was wrapped, and masks drawn "
                "for a whole batch are not those of its microbatches. Switch it off, or wrap the "
                "model again, with use_sequential_preset=False"
            )
        for name in UNREAD:
            named.pop(name, None)
        hidden_states, calls = self.part.first(**named, use_cache=False)
        shapes = {
            name: tuple(named.pop(name).shape)
            for name in self.dense
            if isinstance(named.get(name), torch.Tensor) and named[name].is_floating_point()
        }
        return State(
            hidden_states=hidden_states,
            calls=by_kind(calls, self.kinds, self.model_class),
            encoded_at=None,
            named=named,
            shapes=shapes,
            loss_weight=loss_weight,
            skip_logits=skip_logits,
        )


class Bridge(nn.Module):
    """Ends the encoder by its own forward, ``tail``, and has the decoder begin."""

    def __init__(self, part: Part, tail: Part, name: str, kinds: list[int]) -> None:
        super().__init__()
        self.part = part
        self.tail = tail
        self.name = name  # of the encoder, from the model on
        self.kinds = kinds

    def forward(self, state: State) -> State:
        return self.begin(state)[0]

    def begin(self, state: State) -> tuple[State, type[Any]]:
        """The state that the decoder's first block gets, and the class of the encoder's output."""
        ending = _Ending(self.tail, state["hidden_states"])
        hidden_states, calls = self.part.first(
            **_named(state), use_cache=False, instead={self.name: ending}
        )
        made = by_kind(calls, self.kinds, type(self.part.original.containers[0]))
        output = ending.output
        leaves = pytree.tree_leaves(made)
        encoded_at = next((at for at, leaf in enumerate(leaves) if leaf is output[0]), None)
        if encoded_at is None:
            raise ConfigError("the decoder's blocks do not take what the encoder has made")
        changed = {"hidden_states": hidden_states, "calls": made, "encoded_at": encoded_at}
        return State(**{**state, **changed}), type(output)  # type: ignore[typeddict-item]


class _Ending(nn.Module):
    """Stands for the encoder, whose blocks have run, and ends it."""

    def __init__(self, tail: Part, hidden_states: torch.Tensor) -> None:
        super().__init__()
        self._tail = tail
        self._hidden_states = hidden_states
        self.output: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self._tail.last(self._hidden_states, *args, **kwargs)
        return self.output


class Suffix(nn.Module):
    """Last layer: returns what the model's forward returns.

    ``name``: the encoder's, from the model on, whose outputs are of ``encoder_class``. ``head``:
    see `trial.Findings`.
    """

    def __init__(
        self,
        part: Part,
        name: str,
        encoder_class: type[Any],
        output_class: type[Any] | None = None,
        head: str | None = None,
    ) -> None:
        super().__init__()
        self.part = part
        self.name = name
        self.encoder_class = encoder_class
        self.output_class = output_class
        self.head = head

    def forward(self, state: State) -> Any:
        """Returns what the model's forward returns."""
        hidden_states, weight = state["hidden_states"], state["loss_weight"]
        at: Any = state["encoded_at"]
        output: Any = self.encoder_class(pytree.tree_leaves(state["calls"])[at])
        encoder = self.part.original.containers[0].get_submodule(self.name)
        named = {
            **_named(state),
            "use_cache": False,
            "instead": {self.name: Seen(lambda: output, encoder)},
        }
        labels = named.get("labels")
        if labels is None:
            return self.part.last(hidden_states, **named)
        skips = wants_only_loss(state["skip_logits"])
        if skips and self.head is not None:
            head = self.part.owned[0].get_submodule(self.head)
            if is_plain_linear(head):
                kept = self.part.into(self.head, hidden_states, **named)
                loss = partial(chunked, kept, head, labels, {"shift_labels": labels})
                return self._only(weighted(kept, weight, loss))
        output = self.part.last(hidden_states, **named)
        output.loss = weighted(output.logits, weight, lambda: output.loss)
        return self._only(output.loss) if skips else output

    def _only(self, loss: torch.Tensor) -> Any:
        assert self.output_class is not None
        return self.output_class(loss=loss)


def _named(state: State) -> dict[str, Any]:
    """Returns what the model's forward was given, with zeros for what only the encoder's blocks
    needed."""
    hidden_states = state["hidden_states"]
    zeros = {
        name: hidden_states.new_zeros(()).expand(shape) for name, shape in state["shapes"].items()
    }
    return {**state["named"], **zeros}


def split_batch(
    model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Cuts the arguments of the model's forward into microbatches whose losses add up to that of
    the batch: a mean over its labels, whatever ``num_items_in_batch`` says, as the model's own."""
    named = by_name(type(model), args, kwargs)
    honour_return_logits(named)
    refuse_unknown(model, named, also=("skip_logits", "return_logits"))
    whole = {name: named.pop(name) for name in _WHOLE if name in named}
    parts = [part | whole for _, part in split((), named, None, n).inputs]
    if len(parts) > 1 and named.get("labels") is not None:
        counts = [part["labels"].ne(-100).sum() for part in parts]
        total = sum(counts)
        for part, count in zip(parts, counts, strict=True):
            part["loss_weight"] = float(count / total)
    return [()] * len(parts), parts


def assemble(model: PreTrainedModel, *layers: nn.Module) -> Cut:
    """A model of these layers, whose loss is a mean over labels."""
    return Cut(
        sequential=nn.Sequential(*layers),
        split_input=SplitForward(
            model=model, split=split_batch, check=refuse_unread, averages_labels=True
        ),
        merge_output=merge_outputs,
    )


def is_encoder_decoder(model: nn.Module) -> bool:
    """Says whether transformers counts the class, or one it is made from, among the models that
    make text of text or sound by an encoder and a decoder."""
    names = {
        *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
        *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values(),
    }
    return (
        isinstance(model, PreTrainedModel)
        and bool(model.config.is_encoder_decoder)
        and any(cls.__name__ in names for cls in type(model).__mro__)
    )


def cut(model: PreTrainedModel) -> Cut:
    """Cuts ``model`` and tries the result.

    Raises:
        DoesNotFit: the model is not of this shape, or its own forward gives something else.
    """
    if _augments(model.config):
        raise DoesNotFit(
            "its config asks for SpecAugment (apply_spec_augment), whose masks are drawn for a "
            "whole batch"
        )
    paths = [_path_of_stack(model, each) for each in (model.get_encoder(), model.get_decoder())]
    blocks = [list(model.get_submodule(".".join(path)).children()) for path in paths]
    if any(chooses(block) for stack in blocks for block in stack):
        raise DoesNotFit("it has experts, and what their routers add to its loss is not understood")
    with trial.in_evaluation(model), trial.of_unknown_code():
        made = _cut_at(model, paths, blocks)
    trial.refuse_unreached(model, made)
    return made


def _cut_at(
    model: PreTrainedModel, paths: list[tuple[str, ...]], blocks: list[list[nn.Module]]
) -> Cut:
    samples, returned = trial.run(
        model, [stack[0] for stack in blocks], trial.batches_of_pairs(model)
    )
    source, target = (
        Blocks(path, len(stack), number)
        for path, stack, number in zip(paths, blocks, returned, strict=True)
    )
    inputs, name = samples[0].inputs, ".".join(source.path[:-1])
    first, joined, tail, last = _parts(model, source, target, [name.__ne__] * 4)
    prefix = Prefix(model, first, list(range(source.number)))
    bridge = Bridge(joined, tail, name, list(range(target.number)))
    trial.refuse_skipping(model, lambda: bridge(prefix(**inputs)))
    with trial.called_in(first) as by_first:
        began = prefix(**inputs)
    with trial.called_in(joined) as by_joined, trial.called_in(tail) as by_tail:
        crossed, encoder_class = bridge.begin(began)
    with trial.called_in(last) as by_last, trial.outputs_of_head(model) as of_head:
        output = Suffix(last, name, encoder_class)(crossed)
    called = [names.__contains__ for names in (by_first, by_joined, by_tail, by_last)]
    first, joined, tail, last = _parts(model, source, target, called)
    kinds = [kinds_of(list(state["calls"]), []) for state in (began, crossed)]
    encoder, decoder = (
        [Block(block, kind) for block, kind in zip(stack, numbers, strict=True)]
        for stack, numbers in zip(blocks, kinds, strict=True)
    )
    head = trial.name_of_head(model, of_head, output.logits)
    made = assemble(
        model,
        Prefix(model, first, kinds[0]),
        *encoder,
        Bridge(joined, tail, name, kinds[1]),
        *decoder,
        Suffix(last, name, encoder_class, type(output), head),
    )
    trial.compare(model, made, samples)
    return made


def _parts(
    model: PreTrainedModel,
    source: Blocks,
    target: Blocks,
    is_called: Sequence[Callable[[str], bool]],
) -> list[Part]:
    """Up to the encoder's blocks, from there to the decoder's, of that what ends the encoder, and
    from the decoder's blocks on."""
    encoder = model.get_submodule(".".join(source.path[:-1]))
    ending = source._replace(path=source.path[-1:])
    places = ((model, source), (model, target), (encoder, ending), (model, target))
    return [Part(*place, each) for place, each in zip(places, is_called, strict=True)]


def _path_of_stack(model: PreTrainedModel, stack: Any) -> tuple[str, ...]:
    """Returns the path of the one list of modules that ``stack`` has."""
    where = next((name for name, module in model.named_modules() if module is stack), "")
    found = [name for name, child in stack.named_children() if isinstance(child, nn.ModuleList)]
    if not where or len(found) != 1 or not len(stack.get_submodule(found[0])):
        raise DoesNotFit(
            f"its {where or type(stack).__name__} has the lists of modules {found}, where one of "
            "blocks is needed"
        )
    return (*where.split("."), found[0])


def _augments(config: Any) -> bool:
    return bool(getattr(config, "apply_spec_augment", False)) and any(
        getattr(config, name, 0.0) > 0 for name in ("mask_time_prob", "mask_feature_prob")
    )
