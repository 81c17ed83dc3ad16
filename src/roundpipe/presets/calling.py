"""How a Hugging Face forward is called: by name, without what a sequence of blocks cannot honour,
block by block."""

import copy
import difflib
import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs

from ..errors import ConfigError

# What first layers take besides, see causal_lm.py and loss.py.
_OURS = ("skip_logits", "return_logits", "loss_weight")
# A key-value cache is called the second by later releases of transformers.
CACHES = ("past_key_values", "cache")
_ONE_ADAPTER_EACH = ("adapter_names", "alora_offsets", "task_ids")
# Read by what `refuse_unsupported` and loss.py do with the rest.
_ALWAYS_KNOWN = {
    "return_dict",
    "shift_labels",
    "ignore_index",
    "readout",
    "loss_weight",
    *CACHES,
    *_ONE_ADAPTER_EACH,
    *TransformersKwargs.__annotations__,
}


# Of transformers: what these make of a token is made of that token alone.
_ROW_WISE = {
    "llama": ("LlamaMLP", "LlamaRMSNorm"),
    "mistral": ("MistralMLP", "MistralRMSNorm"),
    "mixtral": ("MixtralRMSNorm",),
    "qwen2": ("Qwen2MLP", "Qwen2RMSNorm"),
    "qwen3": ("Qwen3MLP", "Qwen3RMSNorm"),
    "qwen3_moe": ("Qwen3MoeMLP", "Qwen3MoeRMSNorm"),
    "gpt_oss": ("GptOssRMSNorm",),
    "gpt2": ("GPT2MLP",),
    "gemma2": ("Gemma2MLP", "Gemma2RMSNorm"),
    "gemma3": ("Gemma3MLP", "Gemma3RMSNorm"),
    "phi3": ("Phi3MLP", "Phi3RMSNorm"),
    "olmo2": ("Olmo2MLP", "Olmo2RMSNorm"),
    "smollm3": ("SmolLM3MLP", "SmolLM3RMSNorm"),
}
ROW_WISE = frozenset(
    f"transformers.models.{model}.modeling_{model}.{name}"
    for model, names in _ROW_WISE.items()
    for name in names
)
# Inside of those: anything else may have been put there.
_INSIDE = (
    "torch.nn.modules.linear.",
    "torch.nn.modules.container.",
    "torch.nn.modules.dropout.",
    "transformers.activations.",
    "transformers.pytorch_utils.Conv1D",
    "peft.tuners.lora.",
    "roundpipe_hf.quantization.",
)


def row_wise_in(holder: nn.Module) -> tuple[str, ...]:
    """The modules inside of ``holder`` known to compute each token by itself, outermost only. See
    [Note: row-wise modules]."""
    found: list[str] = []
    for name, module in holder.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and _class_name(module) in ROW_WISE and _holds_known(module):
            found.append(name)
    return tuple(found)


def _holds_known(module: nn.Module) -> bool:
    """ACT2FN has torch's own activations too, which are in one file with its attention."""
    return all(
        _class_name(part).startswith(_INSIDE)
        or type(part) in (nn.SiLU, nn.GELU, nn.ReLU, nn.Sigmoid, nn.Tanh)
        for part in module.modules()
        if part is not module
    )


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def honour_return_logits(named: dict[str, Any]) -> None:
    """Makes ``skip_logits`` of ``return_logits``, its opposite.

    Raises:
        ConfigError: it is False and there are no labels, so that nothing would come back.
    """
    returns = named.pop("return_logits", None)
    if returns is None:
        return
    if not returns and named.get("labels") is None:
        raise ConfigError(
            "return_logits=False without labels leaves nothing to return; give labels, or leave it "
            "out"
        )
    named.setdefault("skip_logits", not returns)


def refuse_unknown(
    model: PreTrainedModel, named: Mapping[str, Any], also: Iterable[str] = ()
) -> None:
    """Raises ConfigError for keywords that neither the model's forward names nor anything it hands
    its ``**kwargs`` to reads: they would change nothing. ``also``: what the preset takes."""
    unknown = set(named) - _ALWAYS_KNOWN - set(parameters_of(type(model))) - set(also)
    if unknown:
        unknown = {name for name in unknown if not _is_read(model, name)}
    if unknown:
        known = {name for name in parameters_of(type(model)) if name not in ("self", "kwargs")}
        known |= {*_ALWAYS_KNOWN, *also}
        close = difflib.get_close_matches(min(unknown), known, n=1, cutoff=0.75)
        remedy = f"did you mean {close[0]!r}?" if close else "leave it out"
        raise ConfigError(
            f"{type(model).__name__} was called with {min(unknown)}=..., which nothing in it "
            f"reads; {remedy}"
        )


def _is_read(model: PreTrainedModel, name: str) -> bool:
    """Whether a loss, an attention or a module gets the keyword; of others' code that takes any,
    nobody can tell."""
    attention = ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)
    forwards = {type(module).forward for module in model.modules()}
    for function in (model.loss_function, attention, *forwards):
        if function is None:
            continue
        parameters = inspect.signature(function).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        module = getattr(function, "__module__", None) or ""
        is_known = module.partition(".")[0] in ("transformers", "torch", "peft")
        if name in parameters or (takes_any and not is_known):
            return True
    return False


def by_name(model_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call of the class's forward, all by name, those of its ``**kwargs``
    among them."""
    signature = inspect.signature(model_class.forward)  # type: ignore[attr-defined]
    ours = {
        name: kwargs[name] for name in _OURS if name in kwargs and name not in signature.parameters
    }
    theirs = {name: value for name, value in kwargs.items() if name not in ours}
    named: dict[str, Any] = dict(signature.bind(None, *args, **theirs).arguments)
    del named[next(iter(signature.parameters))]
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named | ours


def parameters_of(model_class: type) -> Mapping[str, Any]:
    """What the class's forward takes by name."""
    return inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]


def refuse_unsupported(config: Any, kwargs: dict[str, Any]) -> None:
    """Raises for what the model's own forward would do and a sequence of blocks cannot; takes out
    ``return_dict``."""
    in_parts = " or, as its own forward can, wrap the model with use_sequential_preset=False"
    for name, instead in (("output_hidden_states", in_parts), ("output_attentions", "")):
        if kwargs.get(name, getattr(config, name, False)):
            raise ConfigError(
                f"{name}=True: a preset does not collect what blocks return; leave it out{instead}"
            )
    for name in _ONE_ADAPTER_EACH:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{name}: one adapter serves the whole batch in the pipeline; leave it out"
            )
    if kwargs.get("return_logits") is not None:
        raise ConfigError(
            "return_logits: microbatches that are cut already say skip_logits, which is its "
            "opposite"
        )
    if config._attn_implementation == "flex_attention":
        raise ConfigError(
            "flex_attention's BlockMask cannot move between devices; load the model with sdpa or "
            "flash"
        )
    if kwargs.pop("return_dict", None) is False or not config.return_dict:
        raise ConfigError(
            "return_dict=False: the pipeline returns a ModelOutput; use its to_tuple()"
        )


def refuse_cache(kwargs: dict[str, Any]) -> None:
    """A cache is never built, whatever ``config.use_cache`` says; asking for one in the call is an
    error. Takes out what could ask."""
    caches, asked = [kwargs.pop(name, None) for name in CACHES], kwargs.pop("use_cache", None)
    if asked or caches != [None, None]:
        raise ConfigError(
            "the pipeline keeps no key-value cache; leave out past_key_values and use_cache=True"
        )


def refuse_encoder_outputs(named: dict[str, Any]) -> None:
    """Raises ConfigError if the encoder is not to run; takes the argument out."""
    if named.pop("encoder_outputs", None) is not None:
        raise ConfigError(
            "encoder_outputs: the pipeline runs the encoder itself; leave it out, or wrap the "
            "model with use_sequential_preset=False"
        )


def causal_config(config: Any, kwargs: dict[str, Any]) -> Any:
    """The config to make masks with: transformers lets ``is_causal`` of a call override it, and
    hands it to blocks."""
    is_causal = kwargs.get("is_causal", getattr(config, "is_causal", None))
    if is_causal is None:
        return config
    kwargs["is_causal"] = is_causal
    config = copy.copy(config)  # because other microbatches read the model's own meanwhile
    config.is_causal = is_causal
    return config


def run_block(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Hidden states, by a block without the checkpointing that `gradient_checkpointing_enable` puts
    into its own ``__call__``.

    The engine recomputes already. Hooks run all the same: they are in `nn.Module`'s ``__call__``.
    """
    output = nn.Module.__call__(block, *args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def note_lengths(module: nn.Module) -> None:
    """Makes numbers of the sequence lengths that dynamic rotary embeddings have just noted as 0-d
    tensors.

    The engine gives the user's module what a forward has set on its replica, but for tensors, which
    live on a device. Without the length the frequencies would be those of the last batch, not of
    the longest.
    """
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if name.endswith("max_seq_len_cached") and isinstance(value, torch.Tensor):
                setattr(part, name, int(value))


@contextmanager
def put_back(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Until the function that it gives is called, or the context ends, forwards write to copies of
    the buffers in ``module``, and what they set on its modules is lost afterwards."""
    held = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    for part, _, buffers in held:
        part._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})

    def end() -> None:
        while held:
            part, attributes, buffers = held.pop()
            for own, then in ((part._buffers, buffers), (vars(part), attributes)):
                own.clear()
                own.update(then)

    try:
        yield end
    finally:
        end()


def reads_parameter(function: Callable[..., Any], name: str) -> bool:
    """Tells if the code of ``function`` ever reads its parameter ``name``: False where there is no
    code to look into."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = function.forward
    elif not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and name in _names_read(code)


@functools.cache  # because every batch asks; code holds no model
def _names_read(code: CodeType) -> frozenset[str]:
    loads = (one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD"))
    groups = (each if isinstance(each, tuple) else (each,) for each in loads)  # some load two
    return frozenset(name for group in groups for name in group if isinstance(name, str))
