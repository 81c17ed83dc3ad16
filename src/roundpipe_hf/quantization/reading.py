"""Makes weights of what a quantized checkpoint's files hold, without reading a value.

[Note: quantized checkpoints] ``quantization_config.quant_method`` in config.json says which files
these are; each names the parts of a weight in its own way. The tensors of the files go into
`QuantizedWeight` as they lie there, so they stay mapped.
"""

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel

from roundpipe.errors import ConfigError
from roundpipe.quantized import FP8, INT8, MXFP4, NF4, QuantizedWeight

Tensors = dict[str, torch.Tensor]
_NF4_STATE = ".quant_state.bitsandbytes__nf4"
# Of weights that are nothing without a scale.
_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
# A tensor of one expert of a stack. transformers puts them together, quantized as they are.
EXPERT = re.compile(r"\.experts\.\d+\.")


class _Found(NamedTuple):
    """A weight, and the keys of the checkpoint that it is made of."""

    name: str
    weight: QuantizedWeight
    keys: tuple[str, ...]


def method_of(config: Any) -> str | None:
    """How a checkpoint with that config is quantized: a name of `load_pretrained`'s, or that of its
    files; None if it is not."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    said = as_dict(said)
    method = str(said.get("quant_method"))
    is_double = bool(said.get("bnb_4bit_use_double_quant"))
    return ("nf4", "nf4_double")[is_double] if method == "bitsandbytes" else method


def read_quantized(
    files: Sequence[Path], model_class: Any, config: Any, *, mmap: bool, **kwargs: Any
) -> PreTrainedModel:
    """The model of a quantized checkpoint, as ``load_pretrained`` describes it.

    Args:
        files: all of the checkpoint's.
        model_class: no auto class.
        config: with a ``quantization_config``. It is not changed.
        kwargs: of ``from_pretrained``.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    config, said = copy.deepcopy(config), as_dict(config.quantization_config)
    del config.quantization_config
    tensors: Tensors = {}
    for file in files:
        tensors |= tensors_of(file)
    if not mmap:
        tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    # The first is the older name, which the second beats.
    asked = kwargs.pop("torch_dtype", None), kwargs.pop("dtype", None)
    config.dtype = next(
        (each for each in reversed(asked) if each not in (None, "auto")), config.dtype
    )
    dense = dense_dtype(config)
    weights = quantized_weights(tensors, said, dense)
    kwargs |= {"config": config, "state_dict": weights, "dtype": dense}
    loaded = model_class.from_pretrained(None, output_loading_info=True, **kwargs)
    model: PreTrainedModel = loaded[0]
    # Because PEFT writes it into what it saves, and tokenizers are looked for there.
    model.config.name_or_path = model.name_or_path = config.name_or_path
    missing = sorted(loaded[1]["missing_keys"])
    if config.architectures and type(model).__name__ not in config.architectures:
        # Another head than that of the files is made anew, which transformers warns of.
        missing = [key for key in missing if _is_of_base(key, model)]
    if missing:
        raise ConfigError(
            f"{files[0].parent} has no {missing[0]} and lacks {len(missing) - 1} others of "
            f"{model_class.__name__}; a file is missing, or the checkpoint is another class's"
        )
    _freeze(model, {name for name, one in weights.items() if isinstance(one, QuantizedWeight)})
    with contextlib.suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(files[0].parent)
    return loaded if wants_info else model


def _is_of_base(key: str, model: PreTrainedModel) -> bool:
    prefix = model.base_model_prefix
    return not hasattr(model, prefix) or key.startswith(f"{prefix}.")


def tensors_of(file: Path) -> Tensors:
    """All that is in a file, mapped. Raises ConfigError if it is damaged."""
    with _opened(file) as opened:
        keys = opened.keys()
        return {key: opened.get_tensor(key) for key in keys}


def refuse_damaged(files: Iterable[Path]) -> None:
    """Raises ConfigError if one is shorter than it says."""
    for file in files:
        with _opened(file):
            pass


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged ({error}); get it again") from error


def _freeze(model: PreTrainedModel, names: set[str]) -> None:
    """Freezes the quantized weights, which those names of the checkpoint should have become.

    Raises:
        ConfigError: one is dense, or nowhere.
    """
    stacks = {EXPERT.split(name)[0] for name in names if EXPERT.search(name)}
    left = {name for name in names if not EXPERT.search(name)}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            parameter.requires_grad_(False)
            left.discard(name)
        elif parameter.dim() > 2 and name.rpartition(".experts.")[0] in stacks:
            left.add(name)
    if left:
        raise ConfigError(
            f"{type(model).__name__} has no quantized {min(left)!r}, and {len(left) - 1} others "
            "are missing too: the checkpoint is another class's, or the model makes the weight in "
            "a way that leaves nothing quantized. Load it dequantized"
        )


def as_dict(said: Any) -> dict[str, Any]:
    """A ``quantization_config`` as files have it, whatever it has become in a config."""
    return dict(said) if isinstance(said, Mapping) else dict(said.to_dict())


def dense_dtype(config: Any) -> torch.dtype:
    """That of weights where the files of a quantized checkpoint do not say it."""
    said = config.dtype
    dtype = getattr(torch, said) if isinstance(said, str) else said
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def quantized_weights(tensors: Tensors, config: Mapping[str, Any], dtype: torch.dtype) -> Tensors:
    """The weights of a checkpoint by their names, quantized ones as `QuantizedWeight`.

    Args:
        tensors: of all its files, by key.
        config: its ``quantization_config``.
        dtype: that dense weights have, where the files do not say.

    Raises:
        ConfigError: a method that is not read, or a part that is missing or does not fit.
    """
    method = config.get("quant_method")
    if method not in _METHODS:
        raise ConfigError(
            f"quantization_config: quant_method {method!r} is not read; these are: "
            f"{', '.join(_METHODS)}. Load the checkpoint dequantized"
        )
    found = _METHODS[method](tensors, config, dtype)
    if not found:
        raise ConfigError(
            f"quantization_config says {method}, but none of {len(tensors)} tensors is quantized "
            "that way; the checkpoint is damaged or its config.json is another's"
        )
    used = {key for one in found for key in one.keys}
    left = {key: tensor for key, tensor in tensors.items() if key not in used}
    for key, tensor in left.items():
        # transformers would cast it, and take codes for values.
        is_mask = tensor.dtype in (torch.uint8, torch.int8) and not key.endswith(".weight")
        if tensor.dtype in _CODES and not is_mask:
            raise ConfigError(
                f"{key} is {tensor.dtype} and lacks what else a weight in {method} is made of: a "
                "file is missing or of another checkpoint, or this weight is quantized in another "
                "way. Get it again, or load it dequantized"
            )
    return {**left, **{one.name: one.weight for one in found}}


def _nf4(tensors: Tensors, config: Mapping[str, Any], dtype: torch.dtype) -> list[_Found]:
    if not config.get("load_in_4bit"):
        raise ConfigError(
            "bitsandbytes: a checkpoint in 8 bits is not read, because its outliers are multiplied "
            "apart; quantize the original to 'int8' or 'nf4'"
        )
    if config.get("bnb_4bit_quant_type", "fp4") != "nf4":
        raise ConfigError(
            f"bitsandbytes: bnb_4bit_quant_type {config.get('bnb_4bit_quant_type', 'fp4')!r} is "
            "not read; 'nf4' is"
        )
    found = []
    for key in [key for key in tensors if key.endswith(_NF4_STATE)]:
        name = key.removesuffix(_NF4_STATE)
        try:
            state = json.loads(bytes(tensors[key].tolist()))
            nested = state.get("nested_blocksize", 0)
            form = NF4(state["blocksize"], nested, state.get("nested_offset", 0.0))
            shape, own_dtype = torch.Size(state["shape"]), getattr(torch, state["dtype"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{key} does not say what the weight is ({error!r}); get its file again"
            ) from error
        keys = [name + suffix for suffix in _nf4_suffixes(nested > 0)]
        weight = _made(name, tensors, form, keys, shape, own_dtype)
        found.append(_Found(name, weight, (key, *keys)))
    return found


def named_nf4(name: str, weight: QuantizedWeight) -> Tensors:
    """The tensors that a checkpoint of bitsandbytes has for a weight in NF4."""
    form = weight.format
    assert isinstance(form, NF4)
    state = {
        "quant_type": "nf4",
        "blocksize": form.block_size,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    if form.nested_block_size:
        state["nested_blocksize"] = form.nested_block_size
        state["nested_dtype"] = "float32"
        state["nested_offset"] = form.offset
    keys = [name + suffix for suffix in _nf4_suffixes(bool(form.nested_block_size))]
    # Copies, because a file has no two names for one memory, and tables are shared.
    named = {key: part.clone() for key, part in zip(keys[1:], weight.parts[1:], strict=True)}
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {keys[0]: weight.parts[0], **named, name + _NF4_STATE: said}


def _nf4_suffixes(is_nested: bool) -> list[str]:
    nested = [".nested_quant_map", ".nested_absmax"] if is_nested else []
    return ["", ".absmax", ".quant_map", *nested]


def _fp8(tensors: Tensors, config: Mapping[str, Any], dtype: torch.dtype) -> list[_Found]:
    sizes = set(config.get("weight_block_size") or ())
    if len(sizes) != 1 or not min(sizes) > 0:
        raise ConfigError(
            f"fp8: weight_block_size {config.get('weight_block_size')!r} is not read; square "
            "blocks are, of [128, 128] for example"
        )
    return _scaled(tensors, "_scale_inv", FP8(sizes.pop()), dtype)


def _int8(tensors: Tensors, config: Mapping[str, Any], dtype: torch.dtype) -> list[_Found]:
    return _scaled(tensors, "_scale", INT8(), dtype)


def _scaled(tensors: Tensors, suffix: str, form: FP8 | INT8, dtype: torch.dtype) -> list[_Found]:
    found = []
    for key in [key for key in tensors if key.endswith(suffix)]:
        name = key.removesuffix(suffix)
        if not name.endswith(".weight") and (
            name not in tensors or tensors[name].dtype not in _CODES
        ):
            continue  # of activations, say; stacked experts have names of their own
        shape = tensors[name].shape if name in tensors else ()
        weight = _made(name, tensors, form, [name, key], shape, dtype)
        found.append(_Found(name, weight, (name, key)))
    return found


def _mxfp4(tensors: Tensors, config: Mapping[str, Any], dtype: torch.dtype) -> list[_Found]:
    found = []
    for key in [key for key in tensors if key.endswith("_blocks")]:
        name = key.removesuffix("_blocks")
        keys = [key, name + "_scales"]
        sizes = tensors[key].shape
        if len(sizes) != 4:
            raise ConfigError(
                f"{key} has shape {tuple(sizes)}; four dimensions are read: experts, rows, blocks, "
                "bytes. The checkpoint is damaged or of another format"
            )
        experts, rows, blocks, half = sizes
        shape = (experts, 2 * half * blocks, rows)
        weight = _made(name, tensors, MXFP4(), keys, shape, dtype)
        found.append(_Found(name, weight, tuple(keys)))
    return found


def _made(
    name: str, tensors: Tensors, form: Any, keys: list[str], shape: Any, dtype: torch.dtype
) -> QuantizedWeight:
    missing = [key for key in keys if key not in tensors]
    if missing:
        raise ConfigError(
            f"{name}: the checkpoint has {', '.join(key for key in tensors if key in keys)} but "
            f"not {', '.join(missing)}; a file is missing or damaged"
        )
    try:
        return QuantizedWeight(form, [tensors[key] for key in keys], shape, dtype)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


_METHODS: dict[str, Callable[[Tensors, Mapping[str, Any], torch.dtype], list[_Found]]] = {
    "bitsandbytes": _nf4,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "int8": _int8,
}
