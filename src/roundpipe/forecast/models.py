"""A model on the meta device, from its config alone: nothing is loaded, and nothing downloaded."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from ..presets.preset import cut
from ..quantized import FORMATS, QuantizedWeight, quantizable

_SIZES = ("hidden_size", "num_hidden_layers")  # without which a config is not one of a model
_SAID = 200  # characters of another library's error
Owner = tuple[nn.Module, str]


class Described(NamedTuple):
    """What is known of a model before it is made. ``quantization``: that of its files, or
    "none"."""

    model: nn.Module
    quantization: str


@dataclass(frozen=True, kw_only=True)
class ImaginedModel:
    """A model as a sequence of layers on the meta device.

    Args:
        layers: dense ones, with adapters.
        owners: the weights that each format is for, as modules and the names of their parameters.
        quantization: of the checkpoint, "none" if it is dense.
        file_bytes: of the dense weights, without adapters.
    """

    layers: list[nn.Module]
    owners: Mapping[str, list[Owner]]
    quantization: str
    file_bytes: int
    name: str
    vocabulary: int

    @contextmanager
    def quantized(self, quantization: str) -> Iterator[None]:
        """The weights that may be are in that format while the context lasts.

        Raises:
            ConfigError: there are none, or one does not divide into the format's blocks.
        """
        if quantization == "none":
            yield
            return
        owners = self.owners[quantization]
        if not owners:
            raise ConfigError(
                f"{self.name} has no weights that {quantization} is for; leave quantization out"
            )
        dense = [getattr(owner, name) for owner, name in owners]
        made: dict[Any, QuantizedWeight] = {}
        try:
            for (owner, name), weight in zip(owners, dense, strict=True):
                key = weight.shape, weight.dtype
                if key not in made:
                    made[key] = QuantizedWeight.quantize(weight.detach(), FORMATS[quantization])
                setattr(owner, name, nn.Parameter(made[key], requires_grad=False))
            yield
        finally:
            for (owner, name), weight in zip(owners, dense, strict=True):
                setattr(owner, name, weight)


def imagine(source: Any, *, lora: int | None, dtype: torch.dtype | None = None) -> ImaginedModel:
    """Builds the model.

    Args:
        source: a folder with a config.json, a config of transformers', or a model on the meta
            device.
        lora: the rank of adapters on all linear layers but the head; None trains everything.
        dtype: of the weights; default: that of the config.

    Raises:
        ConfigError: no config, an unknown architecture, one without a preset or whose layers do not
            run without values, a rank that is none, or quantized weights that would train.
    """
    model, quantization = _described(source, dtype)
    name = type(model).__name__
    if lora is None and quantization != "none":
        raise ConfigError(
            f"{source} is quantized ({quantization}), and quantized weights do not train; "
            "plan for adapters (--lora 16)"
        )
    owners = {
        form: [
            (model.get_submodule(path), own) for path, own in map(_split, quantizable(model, form))
        ]
        for form in FORMATS
    }
    file_bytes = sum(parameter.nbytes for parameter in model.parameters())
    vocabulary: Any = getattr(getattr(model, "config", None), "vocab_size", None)
    if lora is not None:
        model = _with_adapters(model, lora)
    model.train()
    made = cut(model)
    if made is None or not isinstance(vocabulary, int):
        raise ConfigError(
            f"{name} has no preset for a causal language model, so its layers are not known before "
            "it is loaded; docs/models.md lists those that have one"
        )
    return ImaginedModel(
        layers=list(made.sequential),
        owners=owners,
        quantization=quantization,
        file_bytes=file_bytes,
        name=name,
        vocabulary=vocabulary,
    )


def _split(name: str) -> tuple[str, str]:
    path, _, own = name.rpartition(".")
    return path, own


def _described(source: Any, dtype: torch.dtype | None) -> Described:
    if isinstance(source, nn.Module):
        elsewhere = {p.device.type for p in source.parameters()} - {"meta"}
        if elsewhere:
            raise ConfigError(
                f"the model is on {', '.join(sorted(elsewhere))}; make it within "
                "torch.device('meta'), or name its folder"
            )
        return Described(source, "none")
    config = _config_of(source) if isinstance(source, str | Path) else source
    from transformers import AutoModelForCausalLM, PretrainedConfig

    if not isinstance(config, PretrainedConfig):
        raise ConfigError(
            f"the model is a {type(config).__name__}; give a folder with a config.json, a config "
            "or a model on the meta device"
        )
    config = copy.deepcopy(config)  # because what is taken out of it is the caller's
    quantization = _quantization_of(config)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # of the model's own code, which a config led astray
        raise ConfigError(
            f"no causal language model can be made of a {type(config).__name__} "
            f"({' '.join(str(error).split())[:_SAID]}); plans are for those"
        ) from error
    return Described(model, quantization)


def _config_of(folder: str | Path) -> Any:
    folder = Path(folder)
    folder = folder.parent if folder.name == "config.json" else folder
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json; name a folder with one (that file is all that is read, "
            "and nothing is downloaded)"
        )
    from transformers import AutoConfig

    path = folder / "config.json"
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        said = json.loads(path.read_text())
    except Exception as error:  # what a config's own checks raise is theirs
        raise ConfigError(f"{path} is no config that this transformers reads: {error}") from error
    names = {name: config.attribute_map.get(name, name) for name in _SIZES if hasattr(config, name)}
    missing = [name for name, own in names.items() if not {name, own} & said.keys()]
    if missing and "text_config" not in said:
        raise ConfigError(
            f"{path} does not say {' and '.join(missing)}, which would be guessed; name the folder "
            "of a whole checkpoint"
        )
    for name in (*names, "vocab_size"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size < 1:
            raise ConfigError(f"{path} says {name} is {size}; it must be at least 1")
    return config


def _quantization_of(config: Any) -> str:
    said = getattr(config, "quantization_config", None)
    if said is None:
        return "none"
    said = said if isinstance(said, dict) else said.to_dict()
    method = str(said.get("quant_method"))
    del config.quantization_config
    name = method
    if method == "bitsandbytes":
        is_nf4 = said.get("load_in_4bit") and said.get("bnb_4bit_quant_type", "fp4") == "nf4"
        is_double = bool(said.get("bnb_4bit_use_double_quant"))
        name = ("nf4", "nf4_double")[is_double] if is_nf4 else "bitsandbytes in 8 bits or fp4"
    if name not in FORMATS:
        raise ConfigError(
            f"the checkpoint is quantized by {name!r}; {', '.join(map(repr, FORMATS))} are read"
        )
    return name


def _with_adapters(model: nn.Module, rank: int) -> nn.Module:
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"lora is {rank!r}; give a rank, at least 1")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, target_modules="all-linear")
    # On the meta device like the model: else each matrix is made, and filled, in memory first.
    made: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=True)
    return made


def trained_elements(layers: Sequence[nn.Module]) -> int:
    """Of all weights that train, each once."""
    trained = {id(p): p.numel() for layer in layers for p in layer.parameters() if p.requires_grad}
    return sum(trained.values())
