"""A PEFT adapter on a model without values: PEFT's own code merges one module at a time.

[Note: stand-ins] Every parameter of the model is a single number, seen in the shape of the
parameter. PEFT builds its layers on that and loads the adapter as on any model. For a merge the
parameters of one module get their values, and are stand-ins again afterwards.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import (
    PeftConfig,
    PeftType,
    get_peft_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from roundpipe.errors import ConfigError

from ..compat import AuxiliaryTrainingWrapper, BaseTunerLayer, TrainableTokensWrapper
from ..quantization.reading import refuse_damaged

_NAME = "default"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What PEFT does to the base's weights when it makes an adapter with another one is not in the
# adapter's files.
_LEAVES_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")


def model_of_stand_ins(model_class: Any, config: Any) -> PreTrainedModel:
    """A model of the class that takes no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _stand_in(parameter.shape)
    return model


def folder_of(adapter: str | Path) -> Path:
    """Where an adapter is, if need be in the Hub's cache, where the folder's name tells its
    revision. Raises ConfigError if there is none, or its weights are missing or damaged."""
    config = Path(adapter) / "adapter_config.json"
    is_here = Path(adapter).is_dir()
    try:
        found = config if is_here else cached_file(str(adapter), config.name)
        if not is_here:
            how: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
            any(cached_file(str(adapter), name, **how) for name in _WEIGHTS)
    except OSError as error:
        raise ConfigError(f"{adapter} is no adapter's folder, nor on the Hub: {error}") from error
    if found is None or not Path(found).is_file():
        raise ConfigError(f"{adapter} has no adapter_config.json; name an adapter's folder")
    folder = Path(found).parent.resolve()
    weights = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if not weights:
        raise ConfigError(f"{folder} has no {_WEIGHTS[0]}; get it again")
    refuse_damaged(file for file in weights if file.name == _WEIGHTS[0])
    return folder


class Adapter:
    """What an adapter makes of the parameters of its base.

    Args:
        path: its folder.
        model: its base, a model of stand-ins. It is changed.

    Raises:
        ConfigError: an adapter that cannot be merged exactly, or one of another model.
    """

    def __init__(self, path: str | Path, model: PreTrainedModel) -> None:
        self._path = path
        config = PeftConfig.from_pretrained(str(path))
        self._refuse(config)
        config.inference_mode = True
        try:
            peft: Any = get_peft_model(model, config, low_cpu_mem_usage=True)
            mapping = getattr(model, "_checkpoint_conversion_mapping", {})
            weights = load_peft_weights(str(path), device="cpu", key_mapping=mapping)
            # Weights of the base that it brought along are stand-ins' like too, in float32.
            weights = {k: v.float() if ".base_layer." in k else v for k, v in weights.items()}
            result: Any = set_peft_model_state_dict(peft, weights, low_cpu_mem_usage=True)
        except TypeError as error:  # of adapters over one another, as on one of two tied weights
            raise ConfigError(f"{path} cannot be merged: {error}") from error
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{path} does not fit {type(model).__name__}; name the base that it was trained "
                f"on: {error}"
            ) from error
        missing = [key for key in result.missing_keys if "lora_" in key]
        wrong = [*missing, *result.unexpected_keys]
        if wrong:
            raise ConfigError(
                f"{path} does not fit {type(model).__name__}; name the base that it was trained "
                f"on: {wrong[0]} and {len(wrong) - 1} others are only in one of them"
            )
        self._units = _units(model)
        self._names = {
            path: tuple(f"{path}.{name}" for name in _places(unit))
            for path, unit in self._units.items()
        }
        self._tied = _trained_tied(config, self._units)
        self._refuse_biases()

    @property
    def units(self) -> Mapping[str, tuple[str, ...]]:
        """The modules that it changes, by their names in the base, with the base's names of their
        parameters."""
        return self._names

    def keeps_tied(self, names: Iterable[str]) -> bool:
        """Tells whether these parameters, tied in the base, got the same changes in training."""
        return any(name.rpartition(".")[0] in self._tied for name in names)

    def merge(self, path: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters of a unit when the adapter is merged into them, by their names.

        Args:
            path: of the unit.
            values: of these parameters in the base, in its dtype. They are not changed.
        """
        unit = self._units[path]
        places = {f"{path}.{name}": place for name, place in _places(unit).items()}
        own = {name: _parameter(place) for name, place in places.items()}
        try:
            for name, (module, last) in places.items():
                value = values[name] if _is_stand_in(own[name]) else own[name].detach()
                copied = value.to(values[name].dtype, copy=True)
                module._parameters[last] = nn.Parameter(copied, requires_grad=False)
            _merge(unit)
            return {name: _parameter(place).detach() for name, place in places.items()}
        finally:
            for name, (module, last) in places.items():
                module._parameters[last] = own[name]
            for layer in (one for one in unit.modules() if isinstance(one, BaseTunerLayer)):
                layer.merged_adapters = []
                getattr(layer, "_caches", {}).clear()

    def _refuse(self, config: Any) -> None:
        if config.peft_type != PeftType.LORA:
            raise ConfigError(f"{self._path}: a {config.peft_type.value} adapter is not merged")
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            is_variant = field.metadata.get("is_lora_variant", False)
            if value and field.name != "use_dora" and is_variant:
                raise ConfigError(f"{self._path}: {field.name}={value!r} is not merged")
        if config.layer_replication:
            raise ConfigError(
                f"{self._path}: layer_replication makes layers that the base's files do not have"
            )
        if config.init_lora_weights not in _LEAVES_THE_BASE:
            raise ConfigError(
                f"{self._path}: init_lora_weights={config.init_lora_weights!r} has changed the "
                "base's weights, which the adapter does not say; save it with "
                "path_initial_model_for_weight_conversion"
            )

    def _refuse_biases(self) -> None:
        for path, unit in self._units.items():
            is_biased = getattr(unit, "lora_bias", {}).get(_NAME, False)
            if is_biased and getattr(_base_of(unit), "bias", None) is None:
                raise ConfigError(
                    f"{self._path}: lora_bias of {path} cannot be merged, because that has no bias"
                )


def _units(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that the adapter replaced, and those whose own parameters it brought
    along (biases, say)."""
    found: dict[str, nn.Module] = {}
    within = None
    module: nn.Module
    for name, module in model.named_modules():
        if within is not None and name.startswith(f"{within}."):
            continue
        own = [one for one in module._parameters.values() if one is not None]
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            found[name] = module
            within = name
        elif any(not _is_stand_in(one) for one in own):
            found[name] = module
    return found


def _base_of(unit: Any) -> nn.Module:
    """What is left of the unit without the adapter."""
    if isinstance(unit, AuxiliaryTrainingWrapper):
        base: nn.Module = unit.unload_and_optionally_merge_module(False, False, None)
        return base
    return unit.get_base_layer() if isinstance(unit, BaseTunerLayer) else unit


def _merge(unit: Any) -> None:
    if hasattr(unit, "unload_and_optionally_merge_module"):
        unit.unload_and_optionally_merge_module(True, False, None)
    elif isinstance(unit, BaseTunerLayer):
        unit.merge(safe_merge=False)


def _trained_tied(config: Any, units: Mapping[str, Any]) -> set[str]:
    """The modules that PEFT has train what it trains of the input embeddings. That is for PEFT to
    say, because it does not always do what the config asks.

    Raises:
        ConfigError: tied layers of LoRA, which PEFT's own merge adds twice.
    """
    if getattr(config, "target_modules_to_tie", None):
        raise ConfigError(
            "ensure_weight_tying of LoRA layers is not merged; train with modules_to_save instead"
        )
    tokens = (path for path, unit in units.items() if isinstance(unit, TrainableTokensWrapper))
    tied = {path for path in tokens if units[path].token_adapter.tied_adapter is not None}
    return tied | set(getattr(config, "modules_to_tie", None) or ())


def _places(unit: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where the parameters of the unit's base are, by their names in it."""
    is_wrapper = isinstance(unit, BaseTunerLayer | AuxiliaryTrainingWrapper)
    base, places = _base_of(unit), {}
    for name, _ in base.named_parameters(recurse=is_wrapper):
        path, _, own = name.rpartition(".")
        places[name] = (base.get_submodule(path), own)
    return places


def _parameter(place: tuple[nn.Module, str]) -> nn.Parameter:
    parameter = place[0]._parameters[place[1]]
    assert parameter is not None
    return parameter


def _stand_in(shape: torch.Size) -> nn.Parameter:
    # In float32, because PEFT would round an adapter to the dtype of what it is loaded beside.
    return nn.Parameter(torch.full((1,), torch.nan).expand(shape), requires_grad=False)


def _is_stand_in(parameter: Any) -> bool:
    is_one_number = parameter.untyped_storage().nbytes() == 4
    return is_one_number and bool(parameter.reshape(-1)[0].isnan())
