"""What a preset is, which one fits a model, and the checks every cut must pass.

Never imports transformers: an architecture is recognised by the name of its class, so a preset's
own file, which does import it, is only loaded for a model whose class came from there.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..layers.modes import has_hooks
from ..microbatch import split
from .adapters import base_of
from .experts.low_rank import refuse_other_layouts

logger = logging.getLogger(__name__)

SplitInput = Callable[
    [tuple[Any, ...], dict[str, Any], int],
    tuple[list[tuple[Any, ...]], list[dict[str, Any]]],
]
MergeOutput = Callable[[Sequence[Any], Sequence[int]], Any]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A model as a sequence, and how its inputs and outputs are microbatched.

    Args:
        sequential: children made of the model's *own* submodules, so its parameters and buffers are
            the model's. The first takes the arguments of the model's forward, each later one what
            the one before returned, the last returns what the model's forward returns.
        split_input: ``(args, kwargs, n) -> (args_list, kwargs_list)``, what the forward is given
            cut into at most n microbatches. Sees to it that their losses add up to the loss of the
            batch.
        merge_output: ``(outputs, rows) -> merged``, from the outputs of the microbatches and how
            many rows are in each. Adds those losses. The two belong together: whoever replaces
            ``split_input`` has to keep them so.
    """

    sequential: nn.Sequential
    split_input: SplitInput
    merge_output: MergeOutput


SplitRows = Callable[[Any, dict[str, Any], int], list[dict[str, Any]]]


def split_by_rule(_: Any, named: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """What a forward is given, in at most ``n`` parts: what has the batch's rows is cut."""
    return [part for _, part in split((), named, None, n).inputs]


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitForward:
    """A preset's ``split_input``, which knows what the forward of its model may be given.

    Args:
        model: the model that the preset cuts.
        split: ``(model, args, kwargs, n) -> (args_list, kwargs_list)``.
        check: ``(model, args, kwargs)``, raises for what no call may be given. It is called by
            itself for microbatches that come cut.
        joint: ``(model, args, kwargs)``, whether the losses of a call's microbatches do not add up:
            that of the batch is known once their outputs are merged. None: it never is so.
        split_rows: ``(model, named, n)``, cuts what has rows, and looks at no losses.
        averages_labels: the model's own loss is a mean over its labels that are not -100.
    """

    model: Any
    split: Callable[..., Any]
    check: Callable[..., None]
    joint: Callable[..., bool] | None = None
    split_rows: SplitRows = split_by_rule
    averages_labels: bool = False

    def __call__(self, args: Any, kwargs: Any, n: int) -> Any:
        """Cuts what the forward is given into at most ``n`` microbatches."""
        return self.split(self.model, args, kwargs, n)

    def is_joint(self, args: Any, kwargs: Any) -> bool:
        """Returns True if the loss of such a call is known only of all its microbatches."""
        return self.joint is not None and self.joint(self.model, tuple(args), dict(kwargs or {}))

    def check_cut(self, args: Any, kwargs: Any) -> None:
        """Raises ConfigError for a microbatch with what no call may be given."""
        self.check(self.model, args, kwargs)


CutModel = Callable[[Any], Cut]


class DoesNotFit(Exception):
    """Why a model that has no preset of its own cannot be cut by the generic one."""


# Class of the model -> file in `architectures` (and, after a dot, which function of it) that makes
# a `Cut` of a model; or such a function of the user's own.
_PRESETS: dict[str, str | CutModel] = {
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": "decoders.llama",
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM": "decoders.mistral",
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM": "decoders.qwen",
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM": "decoders.qwen",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM": "decoders.routed",
    "transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM": "decoders.routed",
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssForCausalLM": "decoders.gpt_oss",
    "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel": "decoders.gpt2",
    "transformers.models.vit.modeling_vit.ViTForImageClassification": "vit",
    "transformers.models.t5.modeling_t5.T5ForConditionalGeneration": "t5",
    "transformers.models.mt5.modeling_mt5.MT5ForConditionalGeneration": "t5",
    "transformers.models.llava.modeling_llava.LlavaForConditionalGeneration": "llava",
    "transformers.models.gemma3.modeling_gemma3.Gemma3ForConditionalGeneration": "gemma3",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl"
    ),
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLForConditionalGeneration": "qwen3_vl",
    "transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl"
    ),
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5ForConditionalGeneration": "qwen3_5",
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe.Qwen3_5MoeForConditionalGeneration": (
        "qwen3_5"
    ),
}

_NOT_CAUSAL = ("vit", "t5")
_WITH_IMAGES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def register_preset(kind: type[nn.Module], cut: CutModel) -> None:
    """Has `wrap_model_to_roundpipe` cut every model of a class with ``cut``, also under PEFT.

    Args:
        kind: the class; subclasses that keep its ``forward`` are cut likewise.
        cut: called with a model, returns its `Cut`. Takes the place of an earlier one for ``kind``.

    Example:
        >>> def cut(model):
        ...     layers = nn.Sequential(model.embed, *model.blocks, model.head)
        ...     return Cut(sequential=layers, split_input=split_rows, merge_output=merge_rows)
        >>> register_preset(Tagger, cut)
    """
    _PRESETS[f"{kind.__module__}.{kind.__qualname__}"] = cut


def cut(model: nn.Module) -> Cut | None:
    """Cuts ``model`` (or what an adapter wrapper holds) with the preset of its architecture, else
    the generic one.

    None if neither fits; the log says why where there is a generic one for such models.
    """
    base = base_of(model)
    preset = _preset_of(type(base))
    if isinstance(preset, str):
        file, _, name = preset.partition(".")
        preset = getattr(import_module(f"{__package__}.architectures.{file}"), name or "cut")
    elif preset is None and (generic := _generic_for(base)) is not None:
        preset = generic.cut
    if preset is None:
        return None
    try:
        made: Cut = preset(base)
    except DoesNotFit as reason:
        logger.warning("%s fits no preset: %s", type(base).__name__, reason)
        return None
    _refuse_left_out(model, made.sequential)
    _warn_not_run(model, made.sequential)
    refuse_other_layouts(made.sequential)
    return made


def has_causal_preset(model: nn.Module) -> bool:
    """True if the preset of a causal language model's architecture cuts it, whose last layer has
    what these share: not for a preset of the user's own or the generic one."""
    preset = _preset_of(type(base_of(model)))
    return isinstance(preset, str) and preset not in _NOT_CAUSAL


def has_images(model: nn.Module) -> bool:
    """True if the architecture's own preset takes images beside rows of tokens."""
    return _preset_of(type(base_of(model))) in _WITH_IMAGES


def _generic_for(model: nn.Module) -> Any:
    """The module of the generic preset for such models of transformers, which is not imported for
    others."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    from . import decoder
    from .architectures import encoder_decoder

    if decoder.is_causal_lm(model):
        return decoder
    return encoder_decoder if encoder_decoder.is_encoder_decoder(model) else None


def _preset_of(cls: type) -> str | CutModel | None:
    """The preset of ``cls`` or of an ancestor whose forward it still runs: a subclass with another
    forward is another architecture."""
    for ancestor in cls.__mro__:
        preset = _PRESETS.get(f"{ancestor.__module__}.{ancestor.__qualname__}")
        if preset is not None:
            same_forward = inspect.getattr_static(cls, "forward") is inspect.getattr_static(
                ancestor, "forward"
            )
            return preset if same_forward else None
    return None


def unreached(model: nn.Module, sequential: nn.Sequential) -> list[str]:
    """Names of the model's parameters that are in no layer."""
    reached = set(map(id, sequential.parameters()))
    return [name for name, parameter in model.named_parameters() if id(parameter) not in reached]


def _refuse_left_out(model: nn.Module, sequential: nn.Sequential) -> None:
    """A parameter the sequence does not reach would train in plain PyTorch and silently stand still
    here."""
    left_out = unreached(model, sequential)
    if left_out:
        raise ConfigError(
            f"the preset for {type(base_of(model)).__name__} reaches none of {len(left_out)} "
            "parameters of this model "
            f"({', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}); "
            "pass use_sequential_preset=False to run the model as it is"
        )


def _has_patched_forward(module: nn.Module) -> bool:
    """Of somebody else than this package, whose own patches hand calls to an engine."""
    forward = vars(module).get("forward")
    return forward is not None and not getattr(forward, "calls_engine", False)


def _warn_not_run(model: nn.Module, sequential: nn.Sequential) -> None:
    """Says which hooks and patches are lost because the module they sit on is taken apart instead
    of called."""
    called = set(sequential.modules())
    lost = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if module not in called and (_has_patched_forward(module) or has_hooks(module))
    ]
    if lost:
        logger.warning(
            "hooks on, or a patched forward of, %s will not run: the preset calls its parts", lost
        )
