"""Trying the generic presets out on a few tokens: what each part of the model's forward calls, and
whether it is right.

Runs on the caller's thread when a model is wrapped; the model comes out as it went in.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from .calling import parameters_of
from .experts.routing import wants_auxiliary_loss
from .parts import BlockCall, Blocks, Part, SkippedBlocks
from .preset import Cut, DoesNotFit, unreached

_ROWS, _TOKENS, _PADDING = 2, 7, 3
_TARGET = 5  # tokens of a decoder that has an encoder
_ON_ANY_DEVICE = {"eager", "sdpa"}


class Sample(NamedTuple):
    """A batch and what the model's own forward makes of it."""

    inputs: dict[str, Any]
    output: Any


@contextmanager
def in_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Modes, random numbers and attention of the model are the caller's again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    config: Any = model.config
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    attention = {
        name: each._attn_implementation
        for name, each in {"": config, **inner}.items()
        if each is not None
    }
    model.eval()
    # Flash kernels need a GPU; which masks go where is the same.
    if not _ON_ANY_DEVICE.issuperset(attention.values()):
        config._attn_implementation = "eager"
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        config._attn_implementation = attention
        for module, training in modes:
            module.training = training


@contextmanager
def of_unknown_code() -> Iterator[None]:
    """Whatever is raised within becomes `DoesNotFit`, because an unknown forward may raise anything
    when it is called in another way."""
    try:
        yield
    except DoesNotFit:
        raise
    except Exception as error:
        raise DoesNotFit(
            f"run in parts, its forward raises {type(error).__name__}: {error}"
        ) from error


def run(
    model: PreTrainedModel, blocks: Sequence[nn.Module], batches: Sequence[dict[str, Any]]
) -> tuple[list[Sample], list[int | None]]:
    """The model's own forward of each batch.

    Also how many values each of ``blocks`` returns as a tuple; None if it returns a tensor.
    """
    if any(getattr(each, "attention_type", None) == "block_sparse" for each in model.modules()):
        # BigBird: a short batch, such as a trial's, would change the model for good.
        raise DoesNotFit("the length of its first batch decides how it attends (block_sparse)")
    returned: list[list[Any]] = [[] for _ in blocks]
    with ExitStack() as hooks:
        for block, noted in zip(blocks, returned, strict=True):
            hooks.enter_context(
                block.register_forward_hook(lambda _, __, output, noted=noted: noted.append(output))
            )
        made = [Sample(inputs, model(**inputs, use_cache=False)) for inputs in batches]
    if not all(returned):
        raise DoesNotFit("its forward does not call its blocks")
    return made, [len(each[0]) if isinstance(each[0], tuple) else None for each in returned]


def batches_of_tokens(model: PreTrainedModel) -> list[dict[str, Any]]:
    """One padded on the left and, where the model takes positions, one of packed rows."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (_ROWS, _TOKENS), generator=generator)
    for placeholder in ("image_token_id", "video_token_id"):  # which would have to have an image
        ids.masked_fill_(ids == getattr(model.config, placeholder, -1), 0)
    mask = torch.ones_like(ids)
    mask[0, :_PADDING] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if "position_ids" not in parameters_of(type(model)):
        return [padded, {"input_ids": ids, "labels": ids}]
    packed = torch.arange(_TOKENS).expand(_ROWS, -1) % torch.tensor([[_TOKENS - 2], [_TOKENS - 3]])
    return [padded, {"input_ids": ids, "position_ids": packed, "labels": ids}]


def batches_of_pairs(model: PreTrainedModel) -> list[dict[str, Any]]:
    """For an encoder and a decoder: padded rows, whose labels count unevenly, without the decoder's
    inputs and with them."""
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config

    def some(*shape: int) -> torch.Tensor:
        vocabulary = config.vocab_size
        return torch.randint(min(3, vocabulary - 1), vocabulary, shape, generator=generator)

    labels = some(_ROWS, _TARGET)
    # Because a loss may leave these out, unasked.
    labels[0, 1] = getattr(config, "pad_token_id", None) or 0
    labels[0, 2:] = -100
    takes_more = any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters_of(type(model)).values()
    )
    more = {"num_items_in_batch": torch.tensor(3)} if takes_more else {}
    if model.main_input_name == "input_features":
        # Which is long, so one batch has to do. The length is that of the positions, which a
        # convolution has halved.
        shape = (_ROWS, config.num_mel_bins, 2 * config.max_source_positions)
        sounds = torch.randn(shape, generator=generator).to(model.dtype)
        return [{"input_features": sounds, "labels": labels, **more}]
    mask, of_decoder = torch.ones(_ROWS, _TOKENS, dtype=torch.long), torch.ones_like(labels)
    mask[0, -_PADDING:] = 0
    of_decoder[1, -_PADDING:] = 0
    one = {"input_ids": some(_ROWS, _TOKENS), "attention_mask": mask, "labels": labels, **more}
    begun = {"decoder_input_ids": some(_ROWS, _TARGET), "decoder_attention_mask": of_decoder}
    return [one, one | begun]


class Findings(NamedTuple):
    """What a run of the model's forward in parts has shown.

    ``calls``: what it calls its blocks with. ``head``: the name of its head, if what that returns
    are the logits, as they go to the loss. ``output_class``: what it returns.
    """

    first: Part
    last: Part
    calls: list[BlockCall]
    head: str | None
    output_class: type[Any]


def find(model: PreTrainedModel, blocks: Blocks, inputs: dict[str, Any]) -> Findings:
    """Runs the model's forward in parts that have all of its modules, to see which of them each
    needs."""
    everything = Part(model, blocks, lambda _: True)
    with called_in(everything) as by_first:
        hidden_states, calls = everything.first(**inputs, use_cache=False)
    embeds = hidden_states.new_zeros(*hidden_states.shape[:2], width_of(model))
    # Its stand-ins have no routers, so it could make no auxiliary loss.
    is_asked = wants_auxiliary_loss(type(model), model.config, None)
    is_asked = is_asked or "output_router_logits" in inputs
    silent = {"output_router_logits": False} if is_asked else {}
    with called_in(everything) as by_last, outputs_of_head(model) as returned:
        output = everything.last(
            hidden_states,
            inputs_embeds=embeds,
            labels=inputs["labels"],
            use_cache=False,
            **silent,
        )
    return Findings(
        first=Part(model, blocks, by_first.__contains__),
        last=Part(model, blocks, by_last.__contains__),
        calls=calls,
        head=name_of_head(model, returned, output.logits),
        output_class=type(output),
    )


@contextmanager
def outputs_of_head(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """What the model's head returns while the context lasts."""
    returned: list[torch.Tensor] = []
    head: Any = model.get_output_embeddings()
    with head.register_forward_hook(lambda _, __, output: returned.append(output)):
        yield returned


def name_of_head(
    model: PreTrainedModel, returned: Sequence[torch.Tensor], logits: torch.Tensor
) -> str | None:
    """None unless what the head has returned once are the ``logits``."""
    head = model.get_output_embeddings()
    names = (name for name, child in model.named_children() if child is head)
    return next(names, None) if len(returned) == 1 and logits is returned[0] else None


def refuse_skipping(model: PreTrainedModel, note_calls: Callable[[], Any]) -> None:
    """Whether the model's forward calls all blocks in training too, whatever it draws.

    ``note_calls``: runs it with `Part.first`.

    Raises:
        DoesNotFit: by layer drop or the like it may skip some, each time others.
    """
    model.train()
    try:
        for drawn in (0.0, 1.0 - torch.finfo(torch.float32).eps):
            with _Drawing(drawn):
                note_calls()
    except SkippedBlocks as error:
        raise DoesNotFit("in training its forward may skip blocks (layer drop)") from error
    finally:
        model.eval()


class _Drawing(TorchFunctionMode):
    """`torch.rand` returns nothing but ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return torch.full_like(made, self._value) if func is torch.rand else made


def width_of(model: PreTrainedModel) -> int:
    """Of ``inputs_embeds``."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[-1])


@contextmanager
def called_in(part: Part) -> Iterator[set[str]]:
    """Names, from the model on, of the modules in containers that are called while the context
    lasts."""
    called: set[str] = set()
    with ExitStack() as hooks:
        for depth, owned in enumerate(part.owned):
            for name, child in owned.named_children():
                full = ".".join((*part.blocks.path[:depth], name))
                hooks.enter_context(
                    child.register_forward_pre_hook(lambda *_, full=full: called.add(full))
                )
        yield called


def compare(model: PreTrainedModel, made: Cut, batches: Sequence[Sample]) -> None:
    """Whether the sequence is the model to the bit, and its losses over microbatches add up to that
    of the batch.

    Raises:
        DoesNotFit: with the difference.
    """
    for inputs, theirs in batches:
        ours = _run(made, inputs, 1)
        optional = (name for name in ("aux_loss", "encoder_last_hidden_state") if name in theirs)
        for name in ("logits", "loss", *optional):
            difference = _difference(ours[name], theirs[name])
            if difference:
                raise DoesNotFit(
                    f"as a sequence, its {name} differ from its own forward's by up to "
                    f"{difference:.3g}"
                )
        allowed = _tolerance(model.dtype) * max(1.0, float(theirs.loss))
        of_two, of_head = _run(made, inputs, 2), _run(made, inputs | {"skip_logits": True}, 1)
        checks = [
            ("the losses of two microbatches add up to that of their batch", of_two, "loss"),
            ("its loss is the cross-entropy of its head", of_head, "loss"),
            ("the auxiliary loss of two microbatches is that of their batch", of_two, "aux_loss"),
        ]
        for what, ours, name in checks:
            if name in theirs:
                difference = _difference(ours[name], theirs[name])
                if not difference <= allowed:
                    raise DoesNotFit(f"{what}, but for {difference:.3g}")


def refuse_unreached(model: PreTrainedModel, made: Cut) -> None:
    """Raises DoesNotFit if parameters of the model are in no layer."""
    left_out = unreached(model, made.sequential)
    if left_out:
        raise DoesNotFit(
            f"its forward does not reach {len(left_out)} parameters, {left_out[0]} among them"
        )


def _run(made: Cut, inputs: dict[str, Any], num_microbatch: int) -> Any:
    _, parts = made.split_input((), inputs, num_microbatch)
    outputs = [made.sequential[1:](made.sequential[0](**part)) for part in parts]
    return made.merge_output(outputs, [len(part["labels"]) for part in parts])


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """0 if equal, where both are nan too."""
    if ours.shape != theirs.shape:
        return float("inf")
    differences = (ours.double() - theirs.double()).abs()
    return float(
        differences.masked_fill(ours.isnan() & theirs.isnan(), 0.0)
        .nan_to_num(nan=float("inf"))
        .max()
    )


def _tolerance(dtype: torch.dtype) -> float:
    """Relative: microbatches have fewer rows, and kernels round differently for it."""
    return 100 * torch.finfo(dtype).eps
