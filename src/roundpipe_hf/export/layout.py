"""Which tensors of a checkpoint's files a parameter of the model is made of, and back.

[Note: layouts] Files may have other names for parameters, one tensor for each expert of a stack, or
one tensor for several parameters. transformers knows how it makes parameters of them and how it
writes them again; this asks it for single parameters, first with shapes alone.
"""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from roundpipe.errors import ConfigError

from ..compat import (
    WeightConverter,
    WeightRenaming,
    get_model_conversion_mapping,
    natural_order,
    rename_source_key,
)

Tensors = dict[str, torch.Tensor]


class Source:
    """Some tensors of the files, and the parameters that are made of these and of no others.

    Args:
        model: for its config.
        name: of the first parameter.
        converter: transformers', or None for a tensor that is a parameter as it is.

    Attributes:
        name: of the first parameter, which the files' keys lead to.
        names: of the parameters.
        fault: why these cannot be written as they were, if they cannot.
        other_size: which parameter has another number of elements in the model, if one has.
    """

    def __init__(self, model: PreTrainedModel | None, name: str, converter: Any) -> None:
        self._model, self.name, self._converter = model, name, converter
        self._patterns: dict[str, str | None] = {}
        self._renamed: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self.names: tuple[str, ...] = (name,)
        self.fault: str | None = None
        self.other_size: str | None = None

    @classmethod
    def of_one(cls, name: str) -> "Source":
        """A tensor that is a parameter as it is, and has its name."""
        made = cls(None, name, None)
        made.add(name, None, name)
        return made

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors of the files, experts in their order."""
        return tuple(self._patterns)

    def add(self, key: str, pattern: str | None, renamed: str) -> None:
        """One more tensor belongs to it.

        Args:
            key: of the tensor.
            pattern: of the converter's, which it matches.
            renamed: its name where the converter sees it.
        """
        self._patterns[key], self._renamed[key] = pattern, renamed

    def check(self, shapes: Mapping[str, torch.Size], parameters: Mapping[str, Any]) -> None:
        """Finds out which parameters there are, and whether they can be written, without a value.

        Args:
            shapes: of the tensors, by key.
            parameters: the model's, by name.
        """
        self._shapes = {key: shapes[key] for key in self.keys}
        try:
            made = self.load({key: torch.empty(shapes[key], device="meta") for key in self.keys})
            self.names = tuple(made)
            for name, value in made.items():
                if name not in parameters or parameters[name].shape != value.shape:
                    wanted = tuple(parameters[name].shape) if name in parameters else "no such one"
                    self.fault = f"{name} has shape {tuple(value.shape)}, the model has {wanted}"
                    if name in parameters and parameters[name].numel() != value.numel():
                        self.other_size = self.fault
            written = self.unload(made)
            left = [k for k in self.keys if k not in written]
            if left:
                self.fault = f"transformers does not make {left[0]} again"
        except Exception as error:  # transformers', of any kind
            self.fault = str(error)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """The parameters by name, made of the files' tensors by key."""
        if self._converter is None:
            return {self.name: tensors[self.keys[0]]}
        converter = copy.deepcopy(self._converter)
        for key, pattern in self._patterns.items():
            converter.add_tensor(self.name, key, pattern, tensors[key])
        return self._converted(converter, self.name)

    def unload(self, parameters: Mapping[str, torch.Tensor]) -> Tensors:
        """The files' tensors by key, made of the parameters by name."""
        if self._converter is None:
            return {self.keys[0]: parameters[self.name]}
        converter = copy.deepcopy(self._converter).reverse_transform()
        target = ""
        for name in self.names:
            target, pattern = converter.rename_source_key(name)
            converter.add_tensor(target, name, pattern, parameters[name])
        made = self._converted(converter, target)
        assert self._model is not None
        prefix = f"{self._model.base_model_prefix}."
        made = {name.removeprefix(prefix): value for name, value in made.items()}
        ends = {key: renamed.removeprefix(prefix) for key, renamed in self._renamed.items()}
        return {
            key: _shaped(made[end], self._shapes[key]) for key, end in ends.items() if end in made
        }

    def _converted(self, converter: Any, name: str) -> Tensors:
        assert self._model is not None
        made = converter.convert(name, model=self._model, config=self._model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def refuse_other_weights(model: PreTrainedModel, found: Mapping[str, Source], folder: Path) -> None:
    """Raises ConfigError if the files lack a parameter, or have one of another size.

    Args:
        model: without adapters.
        found: what its parameters are made of.
        folder: of the files.
    """
    remedy = f"a file or config.json of {folder} is missing or another checkpoint's; get it again"
    for source in found.values():
        if source.other_size:
            raise ConfigError(f"{source.other_size}: {remedy}")
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    known = {*found, *(name for name, other in tied.items() if other in found)}
    known |= {other for name, other in tied.items() if name in found}
    made_anew = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    missing = [
        name
        for name, _ in model.named_parameters()
        if name not in known and not any(re.search(pattern, name) for pattern in made_anew)
    ]
    if missing:
        raise ConfigError(
            f"{missing[0]} and {len(missing) - 1} others of {type(model).__name__} are in no file: "
            f"{remedy}"
        )


def sources(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> dict[str, Source]:
    """What each parameter of the model is made of, as ``from_pretrained`` finds it.

    Args:
        model: in any memory, without adapters.
        shapes: of all tensors in the checkpoint, by key.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix, parameters = model.base_model_prefix, model.state_dict()
    found: dict[str, Source] = {}
    for key in sorted(shapes, key=natural_order):
        name, pattern = rename_source_key(key, renamings, converters, prefix, parameters)
        renamed = rename_source_key(key, renamings, [])[0]
        if name not in parameters and key in parameters:
            name, pattern = rename_source_key(key, [], [], prefix, parameters)
        converter = None if pattern is None else by_pattern[pattern]
        if name in parameters:
            found.setdefault(name, Source(model, name, converter)).add(key, pattern, renamed)
    for source in found.values():
        source.check(shapes, parameters)
    return {name: source for source in found.values() for name in (*source.names, source.name)}


def _shaped(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns it as it lies in the file. transformers leaves out dimensions of one, and does not
    turn back what it turned because files have experts the other way round (Qwen3-VL-MoE)."""
    is_turned = value.shape != shape and value.ndim > 1 and value.mT.shape == shape
    return value.mT.contiguous() if is_turned else value.reshape(shape)
