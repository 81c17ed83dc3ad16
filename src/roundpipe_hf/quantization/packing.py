"""Quantizes a checkpoint file by file, into files that are read the next time.

[Note: killed while writing] in folders.py says what an interrupted run leaves.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from roundpipe.errors import ConfigError
from roundpipe.quantized import FORMATS, Format, QuantizedWeight, quantizable
from roundpipe.system.progress import progress

from ..folders import CONFIG, NewFolder, identity_of, write_tensors
from .reading import EXPERT, named_nf4, refuse_damaged

_CONFIGS: dict[str, dict[str, Any]] = {
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int8": {"quant_method": "int8"},
    "mxfp4": {"quant_method": "mxfp4"},
}
_CONFIGS["nf4_double"] = {**_CONFIGS["nf4"], "bnb_4bit_use_double_quant": True}
# Of a weight, scales counted.
_BITS = {"nf4": 4.5, "nf4_double": 4.13, "fp8": 8.01, "int8": 8.01, "mxfp4": 4.25}


def quantize_checkpoint(
    files: Sequence[Path],
    out: Path,
    quantization: str,
    is_quantized: Callable[[str], bool],
    shapes: Mapping[str, torch.Size] | None = None,
) -> None:
    """Writes a checkpoint to ``out``, some of its weights quantized. At most one of its files is in
    memory at once.

    Started again after it was interrupted, it goes on with the first file that is missing.

    Args:
        files: all of its safetensors files, which have a config.json beside them.
        out: a new folder, or one that this has begun.
        quantization: "nf4", "nf4_double", "fp8", "int8" or "mxfp4".
        is_quantized: of a key.
        shapes: of the model's weights. What lies the other way round in the files (experts of
            Qwen3-VL-MoE) is turned first, because blocks are of rows.

    Raises:
        ConfigError: another quantization, a file that is damaged, a weight that does not divide
            into blocks, a folder that holds something else (made of other files, or in another
            way), or too little room on its disk. Nothing is written.
    """
    if quantization not in _CONFIGS:
        raise ConfigError(
            f"quantization is {quantization!r}; {', '.join(map(repr, _CONFIGS))} can be written"
        )
    source = files[0].parent
    identity = _identity(files, quantization)
    begun = {"source": str(source.resolve()), "quantization": quantization, "identity": identity}
    folder = NewFolder(out, "quantizing.json", begun)
    # Because every process of a run loads the model: the first one writes, the others find it.
    with folder.locked():
        if folder.is_finished():
            folder.tidy()
            return
        folder.check()
        refuse_damaged(files)
        metadata = NewFolder.metadata(identity)
        _quantize(files, folder, quantization, is_quantized, shapes or {}, metadata)


def _quantize(
    files: Sequence[Path],
    folder: NewFolder,
    quantization: str,
    is_quantized: Callable[[str], bool],
    shapes: Mapping[str, torch.Size],
    metadata: dict[str, str],
) -> None:
    folder.check_room(_num_bytes(folder, files, quantization, is_quantized, shapes))
    folder.begin()
    index: dict[str, str] = {}
    for file in progress(files, desc=f"Quantizing to {quantization}", unit="file"):
        target = folder.path / file.name
        if not target.exists():
            tensors = dict(_quantized(file, quantization, is_quantized, shapes))
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            folder.save(file.name, partial(_write, tensors, metadata), num_bytes)
        with safe_open(target, "pt") as opened:
            index |= dict.fromkeys(opened.keys(), file.name)
    if [file.name for file in files] != [SAFE_WEIGHTS_NAME]:
        folder.write_index(index, sum((folder.path / file.name).stat().st_size for file in files))
    source = files[0].parent
    config = json.loads((source / CONFIG).read_text())
    config["quantization_config"] = _CONFIGS[quantization]
    folder.finish(source, config)


def _write(tensors: dict[str, torch.Tensor], metadata: dict[str, str], path: Path) -> None:
    held = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    # Not safetensors' own, which writes the metadata in any order.
    write_tensors(path, held, tensors.items(), metadata, lambda num_bytes: None)


def on_meta(model_class: Any, config: PretrainedConfig) -> Any:
    """Such a model without memory for weights."""
    with torch.device("meta"):
        return model_class(config)


def quantized_keys(model: nn.Module, quantization: str) -> Callable[[str], bool]:
    """Which weights of such a model are quantized: linear layers but the head, or, as "mxfp4",
    stacked experts. Of experts that are a tensor each all weights are."""
    wanted = set(quantizable(model, quantization))
    return lambda key: key in wanted or (key.endswith(".weight") and bool(EXPERT.search(key)))


def default_folder(files: Sequence[Path], quantization: str) -> Path:
    """In the Hugging Face cache, by what the files are called and how large and old they are."""
    return Path(HF_HOME) / "roundpipe" / f"{quantization}-{_identity(files, quantization)}"


def _identity(files: Sequence[Path], quantization: str) -> str:
    return identity_of(f"{files[0].parent.resolve()}, {quantization}", files)


def _num_bytes(
    folder: NewFolder,
    files: Sequence[Path],
    quantization: str,
    is_quantized: Callable[[str], bool],
    shapes: Mapping[str, torch.Size],
) -> float:
    """How much is to be written, by shapes, before a value is read; also raises if one does not
    divide into blocks."""
    needed, any_quantized = 0.0, any(folder.has(file.name) for file in files)
    for file in files:
        if folder.has(file.name):
            continue
        with safe_open(file, "pt") as opened:
            keys = opened.keys()
            for key in keys:
                shape = opened.get_slice(key).get_shape()
                if is_quantized(key):
                    any_quantized = True
                    made = shapes[key] if _is_turned(shape, shapes.get(key)) else shape
                    _check_shape(key, list(made), quantization)
                bits = _BITS[quantization] if is_quantized(key) else 32
                needed += math.prod(shape) * bits / 8
    if not any_quantized:
        raise ConfigError(
            f"none of the tensors in {files[0].parent} is a weight that {quantization} is for; "
            "its keys may be those of another class, or its experts not stacked"
        )
    return needed


def _check_shape(key: str, shape: list[int], quantization: str) -> None:
    try:
        FORMATS[quantization].check_shape(shape)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _is_turned(shape: Sequence[int], wanted: Sequence[int] | None) -> bool:
    if wanted is None or list(shape) == list(wanted):
        return False
    *others, rows, columns = shape
    return len(others) == 1 and [*others, columns, rows] == list(wanted)


def _quantized(
    file: Path,
    quantization: str,
    is_quantized: Callable[[str], bool],
    shapes: Mapping[str, torch.Size],
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the new file holds in place of the old one's tensors."""
    with safe_open(file, "pt") as opened:
        keys = opened.keys()
        for key in keys:
            tensor = opened.get_tensor(key)
            if not is_quantized(key):
                yield key, tensor
                continue
            if _is_turned(tensor.shape, shapes.get(key)):
                tensor = tensor.mT.contiguous()
            parts = FORMATS[quantization].quantize(tensor)
            yield from _NAMED[quantization](key, tensor, parts)


Named = Iterator[tuple[str, torch.Tensor]]


def _as_bitsandbytes(
    form: Format, key: str, weight: torch.Tensor, parts: tuple[torch.Tensor, ...]
) -> Named:
    yield from named_nf4(key, QuantizedWeight(form, parts, weight.shape, weight.dtype)).items()


def _with_scale(
    suffixes: tuple[str, str], key: str, weight: torch.Tensor, parts: tuple[torch.Tensor, ...]
) -> Named:
    for suffix, part in zip(suffixes, parts, strict=True):
        yield key + suffix, part


_NAMED: dict[str, Callable[[str, torch.Tensor, tuple[torch.Tensor, ...]], Named]] = {
    **{name: partial(_as_bitsandbytes, FORMATS[name]) for name in ("nf4", "nf4_double")},
    "fp8": partial(_with_scale, ("", "_scale_inv")),
    "int8": partial(_with_scale, ("", "_scale")),
    "mxfp4": partial(_with_scale, ("_blocks", "_scales")),
}
