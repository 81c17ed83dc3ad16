"""Writes a checkpoint again whose experts are a tensor each, with the stacks that models have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from roundpipe.errors import ConfigError

from ..compat import model_class_of
from ..files import Checkpoint
from ..folders import CONFIG, NewFolder, Progress, identity_of, write_tensors
from ..loading import class_of, config_of
from ..quantization.reading import EXPERT, method_of
from .adapter import model_of_stand_ins
from .layout import Source, refuse_other_weights, sources
from .weights import Weights

_FILE_BYTES = 4 * 10**9


def stack_experts(base: str | Path, out: str | Path) -> None:
    """Writes a checkpoint in which the experts of a layer are one tensor, as the model has them.

    Most mixtures of experts are published with a tensor for each expert. transformers stacks these
    whenever it loads them, so they are in memory. What this writes stays in its files with
    ``load_pretrained``, and streams from there. One stack is in memory at once.

    A file is whole or not there, and ``config.json`` comes last. Call it again after it was
    interrupted, and it goes on with the first file that is missing.

    Args:
        base: a folder with safetensors files, or the name of a model in the Hub's cache.
        out: a new folder, or one that this has begun.

    Raises:
        ConfigError: a checkpoint without such experts or with quantized ones, one of another model,
            a folder that holds something else, or too little room on its disk. Nothing has been
            written.
        OSError: the disk ran full. What was finished stays.

    Example:
        >>> stack_experts("path/to/qwen3-moe", "outputs/stacked")
        >>> model = load_pretrained("outputs/stacked")
        >>> args = RoundPipeTrainingArguments("out", pin_model="off")
    """
    checkpoint = Checkpoint(base, {})
    identity = identity_of(str(checkpoint.folder.resolve()), checkpoint.files)
    begun = {"base": str(checkpoint.folder.resolve()), "identity": identity}
    folder = NewFolder(Path(out), "stacking.json", begun)
    with folder.locked():
        if folder.is_finished():
            folder.tidy()
            return
        folder.check()
        files = _files(checkpoint, config_of(base, {}))
        sizes = {name: sum(one.num_bytes for one in held) for name, held in files.items()}
        folder.write_files(
            sizes, lambda name, *how: _write(files[name], identity, *how), "Stacking"
        )
        index = {key: file for file, held in files.items() for one in held for key in one.shapes}
        folder.write_index(index, sum(sizes.values()))
        config = json.loads((checkpoint.folder / CONFIG).read_text())
        folder.finish(checkpoint.folder, config, ".py")


class _Held(NamedTuple):
    """What one source makes, and what it is made of."""

    source: Source
    tensors: dict[str, torch.Tensor]
    shapes: dict[str, torch.Size]

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def num_bytes(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values()) * self.dtype.itemsize


def _files(checkpoint: Checkpoint, config: Any) -> dict[str, list[_Held]]:
    """What is in the new files, by their names, before a value is read."""
    method = method_of(config)
    if method is not None:
        raise ConfigError(
            f"{checkpoint.folder} is quantized ({method}): such experts are stacked as they are "
            "while load_pretrained() loads them"
        )
    weights = Weights(checkpoint.files, config).tensors
    if not any(map(EXPERT.search, weights)):
        raise ConfigError(f"{checkpoint.folder} has no tensor of a single expert; load it as it is")
    model = model_of_stand_ins(model_class_of(class_of("", {"config": config}), config), config)
    parameters = model.state_dict()
    found = sources(model, {key: one.shape for key, one in weights.items()})
    refuse_other_weights(model, found, checkpoint.folder)
    files: list[list[_Held]] = [[]]
    for source in {id(one): one for one in found.values()}.values():
        own = {key: weights.pop(key) for key in source.keys}
        if source.fault or len({one.dtype for one in own.values()}) > 1:
            raise ConfigError(
                f"{source.keys[0]}: it cannot be told what the model makes of it: "
                f"{source.fault or 'tensors of several dtypes'}"
            )
        held = _Held(source, own, {name: parameters[name].shape for name in source.names})
        if sum(one.num_bytes for one in files[-1]) + held.num_bytes > _FILE_BYTES and files[-1]:
            files.append([])
        files[-1].append(held)
    # What the model has no place for stays what it is.
    files[-1] += [
        _Held(Source.of_one(key), {key: one}, {key: one.shape}) for key, one in weights.items()
    ]
    last = len(files)
    return {f"model-{n:05}-of-{last:05}.safetensors": held for n, held in enumerate(files, 1)}


def _write(held: list[_Held], identity: str, progress: Progress, path: Path) -> None:
    shapes = {name: (one.dtype, shape) for one in held for name, shape in one.shapes.items()}
    write_tensors(path, shapes, _made(held), NewFolder.metadata(identity), progress)


def _made(held: list[_Held]) -> Iterator[tuple[str, torch.Tensor]]:
    for one in held:
        yield from one.source.load(one.tensors).items()
