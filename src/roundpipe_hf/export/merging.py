"""Merges an adapter into the files of its base, tensor by tensor."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import SAFE_WEIGHTS_NAME

from roundpipe.errors import ConfigError

from ..compat import model_class_of
from ..files import Checkpoint
from ..folders import CONFIG, NewFolder, Progress, identity_of, write_tensors
from ..loading import class_of, config_of
from .adapter import Adapter, folder_of, model_of_stand_ins
from .layout import Source, Tensors, refuse_other_weights, sources
from .weights import Weights, dense


def merge_and_save(adapter: str | Path, base: str | Path, out: str | Path) -> None:
    """Merges a LoRA adapter into its base and writes the result as a checkpoint of its own, in the
    base's layout: the same files with the same tensors, its config, tokenizer and whatever else
    lies beside them.

    The numbers are those of PEFT's ``merge_and_unload()``, bit for bit. The model is never loaded:
    one tensor is in memory at once, or one stack of experts, and the adapter. A base that is
    quantized (NF4, FP8, MXFP4, int8) is written dequantized, in the dtype that its config names.
    An adapter of one of two tied embeddings unties them.

    A file is whole or not there, and ``config.json`` comes last. Call it again after it was
    interrupted, and it goes on with the first file that is missing.

    Args:
        adapter: a folder with adapter_config.json, or the name of an adapter on the Hub.
        base: a folder with safetensors files, or the name of a model in the Hub's cache.
        out: a new folder, or one that this has begun.

    Raises:
        ConfigError: an adapter that cannot be merged exactly (another method than LoRA or DoRA, an
            initialization that changed the base, shapes of another model), files that are damaged,
            missing or another checkpoint's, weights that they hold in a way that cannot be written
            again, a folder that holds something else, or too little room on its disk. Nothing has
            been written.
        OSError: the disk ran full. What was finished stays.

    Example:
        >>> trainer.save_model("outputs/adapter")
        >>> merge_and_save("outputs/adapter", "path/to/base", "outputs/merged")
        >>> model = AutoModelForCausalLM.from_pretrained("outputs/merged")
    """
    files = Checkpoint(base, {})
    adapter = folder_of(adapter)
    own = sorted(adapter.glob("adapter_*"))
    said = f"{adapter}, {files.folder.resolve()}"
    identity = identity_of(said, [*own, *files.files])
    begun = {"base": str(files.folder.resolve()), "adapter": str(adapter), "identity": identity}
    folder = NewFolder(Path(out), "merging.json", begun)
    with folder.locked():
        if folder.is_finished():
            folder.tidy()
            return
        folder.check()
        merge = _Merge(files, config_of(base, {}), adapter, identity)
        folder.write_files(merge.sizes, merge.write, "Merging")
        if list(merge.sizes) != [SAFE_WEIGHTS_NAME]:
            folder.write_index(merge.weight_map, sum(merge.sizes.values()))
        folder.finish(files.folder, merge.config, ".py")


class _Group(NamedTuple):
    """Modules that the adapter changes, and the tensors of the files that only they are made of."""

    units: list[str]
    sources: list[Source]


class _Merge:
    """What is in the new files, known before one is written."""

    def __init__(
        self, checkpoint: Checkpoint, config: Any, adapter: str | Path, identity: str
    ) -> None:
        self.config = json.loads((checkpoint.folder / CONFIG).read_text())
        self.config.pop("quantization_config", None)
        model_class = model_class_of(class_of("", {"config": config}), config)
        read = Weights(checkpoint.files, config)
        self._weights, self.weight_map = read.tensors, read.in_file
        model, adapted = (model_of_stand_ins(model_class, config) for _ in range(2))
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        found = sources(model, {name: one.shape for name, one in self._weights.items()})
        refuse_other_weights(model, found, checkpoint.folder)
        self._adapter = Adapter(adapter, adapted)
        self._part_ties(tied, found)
        self._groups = _groups(self._adapter, found, set(tied))
        self._refuse_whole_numbers()
        self._metadata = NewFolder.metadata(identity)

    @property
    def sizes(self) -> dict[str, int]:
        """The new files in their order, and how many bytes of tensors are in each."""
        files = dict.fromkeys(sorted(self.weight_map.values()), 0)
        for name, file in self.weight_map.items():
            files[file] += self._weights[name].numel() * self._weights[name].dtype.itemsize
        return files

    def write(self, file: str, progress: Progress, path: Path) -> None:
        """Writes that file to ``path``."""
        own = sorted(name for name in self._weights if self.weight_map[name] == file)
        held = {name: (self._weights[name].dtype, self._weights[name].shape) for name in own}
        write_tensors(path, held, self._tensors(own), self._metadata, progress)

    def _tensors(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        left = set(names)
        for group in self._groups:
            keys = {key for source in group.sources for key in source.keys}
            if keys & left:
                for key, tensor in self._merged(group).items():
                    if key in left:
                        yield key, tensor
                left -= keys
        for name in sorted(left):
            yield name, dense(self._weights[name])

    def _merged(self, group: _Group) -> Tensors:
        values: Tensors = {}
        for source in group.sources:
            values |= source.load({key: dense(self._weights[key]) for key in source.keys})
        for unit in group.units:
            values |= self._adapter.merge(unit, values)
        merged: Tensors = {}
        for source in group.sources:
            for key, tensor in source.unload({name: values[name] for name in source.names}).items():
                merged[key] = tensor.to(self._weights[key].dtype)
        return merged

    def _refuse_whole_numbers(self) -> None:
        """Because what an adapter adds to them would be lost."""
        of_files = (key for group in self._groups for one in group.sources for key in one.keys)
        for key in of_files:
            if not self._weights[key].is_floating_point():
                raise ConfigError(
                    f"{key} is {self._weights[key].dtype} in the base's files, and the adapter "
                    "changes it by fractions: they are damaged or quantized in a way that "
                    "config.json does not say; get them again"
                )

    def _part_ties(self, tied: Mapping[str, str], found: dict[str, Source]) -> None:
        """Gives a weight that is tied to another one a tensor of its own, where the adapter changes
        either and not both alike."""
        touched = {name for names in self._adapter.units.values() for name in names}
        for name, other in tied.items():
            there = next((one for one in (other, name) if one in found), None)
            is_parted = touched & {name, other} and not self._adapter.keeps_tied((name, other))
            if not is_parted or there is None:
                continue
            for config in (self.config, *filter(_says_tied, self.config.values())):
                config["tie_word_embeddings"] = False
            (key,) = found[there].keys
            for missing in {name, other} - found.keys():
                self._weights[missing] = self._weights[key]
                self.weight_map[missing] = self.weight_map[key]
                found[missing] = Source.of_one(missing)


def _says_tied(value: Any) -> bool:
    return isinstance(value, dict) and "tie_word_embeddings" in value


def _groups(adapter: Adapter, found: Mapping[str, Source], tied: set[str]) -> list[_Group]:
    """What has to be merged together, because it is made of the same tensors.

    Args:
        found: by each parameter that is made of it.
        tied: parameters that may be in no file.

    Raises:
        ConfigError: the files hold a parameter that is changed in a way that cannot be written.
    """
    groups: list[_Group] = []
    for unit, names in adapter.units.items():
        own: dict[str, Source] = {}
        for name in names:
            if name in found:
                own[found[name].keys[0]] = found[name]
            elif name not in tied:
                raise ConfigError(f"{name}, which the adapter changes, is not in the base's files")
        for source in own.values():
            if source.fault:
                raise ConfigError(
                    f"{source.keys[0]}: the adapter changes what is made of it, and that cannot be "
                    f"written as it was: {source.fault}"
                )
        near = [group for group in groups if any(one in own.values() for one in group.sources)]
        units = [unit for group in near for unit in group.units]
        own |= {source.keys[0]: source for group in near for source in group.sources}
        groups = [group for group in groups if group not in near]
        if own:
            groups.append(_Group([*units, unit], list(own.values())))
    return groups
