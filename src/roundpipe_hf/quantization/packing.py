"""Quantizes a checkpoint file by file, into files that are read the next time.

[Note: killed while writing] A file of the new checkpoint is written under another name and renamed
when it is on the disk; config.json comes last. So what has its name is whole, a folder with a
config.json is complete, and without one the files that are there are gone on with.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from roundpipe.errors import ConfigError
from roundpipe.quantized import FORMATS, NF4, quantizable

from .reading import EXPERT

Tensors = dict[str, torch.Tensor]
_SPARED_BYTES = 2**28  # that stay free on the disk: other programs write there too
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
_BITS = {"nf4": 4.5, "fp8": 8.01, "int8": 8.01, "mxfp4": 4.25}  # of a weight, scales counted


def quantize_checkpoint(
    source: Path, out: Path, quantization: str, is_quantized: Callable[[str], bool]
) -> None:
    """Writes the checkpoint in ``source`` to ``out``, some of its weights quantized. At most one of
    its files is in memory at once.

    Started again after it was interrupted, it goes on with the first file that is missing.

    Args:
        source: a folder with safetensors files and a config.json.
        out: a new folder, or one that this has begun.
        quantization: "nf4", "fp8", "int8" or "mxfp4".
        is_quantized: of a key.

    Raises:
        ConfigError: another quantization, a weight that does not divide into blocks, a folder that
            holds something else, or too little room on its disk. Nothing is written.
    """
    if quantization not in _CONFIGS:
        raise ConfigError(
            f"quantization is {quantization!r}; {', '.join(map(repr, _CONFIGS))} can be written"
        )
    # Because every process of a run loads the model: the first one writes, the others find it.
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir()) / f"roundpipe-{name}.lock"):
        _quantize(source, out, quantization, is_quantized)


def _quantize(
    source: Path, out: Path, quantization: str, is_quantized: Callable[[str], bool]
) -> None:
    files = _files(source)
    if not files:
        raise ConfigError(f"{source} has no safetensors files; save it with save_pretrained first")
    if (out / "config.json").exists():
        return
    _check_folder(out, source, quantization)
    _check_room(out, files, quantization, is_quantized)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / _BEGUN, json.dumps(_begun(source, quantization)).encode())
    index: dict[str, str] = {}
    for file in tqdm(files, desc=f"Quantizing to {quantization}", unit="file"):
        target = out / file.name
        if not target.exists():
            _save(dict(_quantized(file, quantization, is_quantized)), target)
        with safe_open(target, "pt") as opened:
            index |= dict.fromkeys(opened.keys(), file.name)
    for other in source.iterdir():
        is_copied = other.suffix in (".json", ".txt", ".model", ".jinja")
        if is_copied and other.name not in ("config.json", SAFE_WEIGHTS_INDEX_NAME):
            shutil.copyfile(other, out / other.name)
    if len(files) > 1:
        size = sum((out / file.name).stat().st_size for file in files)
        content = {"metadata": {"total_size": size}, "weight_map": index}
        _write(out / SAFE_WEIGHTS_INDEX_NAME, json.dumps(content, indent=2).encode())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _CONFIGS[quantization]
    # Last, because a folder with a config is taken for complete.
    _write(out / "config.json", json.dumps(config, indent=2).encode())
    (out / _BEGUN).unlink()


def quantized_keys(
    model_class: Any, config: PretrainedConfig, quantization: str
) -> Callable[[str], bool]:
    """Which weights of such a model are quantized: linear layers but the head, or, as "mxfp4",
    stacked experts. Of experts that are a tensor each all weights are."""
    with torch.device("meta"):
        model = model_class(config)
    wanted = set(quantizable(model, quantization))
    return lambda key: key in wanted or (key.endswith(".weight") and bool(EXPERT.search(key)))


def default_folder(source: Path, quantization: str) -> Path:
    """In the Hugging Face cache, by what the files are called and how large and old they are."""
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in _files(source)]
    name = hashlib.sha256(repr((str(source.resolve()), files)).encode()).hexdigest()[:16]
    return Path(HF_HOME) / "roundpipe" / f"{quantization}-{name}"


def _files(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors"))


_BEGUN = "quantizing.json"


def _begun(source: Path, quantization: str) -> dict[str, Any]:
    return {"source": str(source.resolve()), "quantization": quantization}


def _check_folder(out: Path, source: Path, quantization: str) -> None:
    begun = out / _BEGUN
    # What was killed before it said what it begins has left no more than that file's beginning.
    own = begun.with_suffix(".part")
    if not out.exists() or all(file == own for file in out.iterdir()):
        return
    there = json.loads(begun.read_text()) if begun.exists() else None
    if there != _begun(source, quantization):
        raise ConfigError(
            f"{out} holds {there or 'something else'}, not the beginning of {source} as "
            f"{quantization}; name another folder or empty it"
        )


def _check_room(
    out: Path, files: list[Path], quantization: str, is_quantized: Callable[[str], bool]
) -> None:
    """By shapes, before a value is read; also raises if one does not divide into blocks."""
    needed, any_quantized = 0.0, any((out / file.name).exists() for file in files)
    for file in files:
        if (out / file.name).exists():
            continue
        with safe_open(file, "pt") as opened:
            keys = opened.keys()
            for key in keys:
                shape = opened.get_slice(key).get_shape()
                if is_quantized(key):
                    any_quantized = True
                    _check_shape(key, shape, quantization)
                bits = _BITS[quantization] if is_quantized(key) else 32
                needed += math.prod(shape) * bits / 8
    if not any_quantized:
        raise ConfigError(
            f"none of the tensors in {files[0].parent} is a weight that {quantization} is for; "
            "its keys may be those of another class, or its experts not stacked"
        )
    folder = next(parent for parent in (out, *out.resolve().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed + _SPARED_BYTES > free:
        raise ConfigError(
            f"{out}: about {needed / 1e9:.1f} GB are to be written and {free / 1e9:.1f} GB are "
            "free on its disk; name a folder on another"
        )


def _check_shape(key: str, shape: list[int], quantization: str) -> None:
    try:
        FORMATS[quantization].check_shape(shape)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _quantized(
    file: Path, quantization: str, is_quantized: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the new file holds in place of the old one's tensors."""
    with safe_open(file, "pt") as opened:
        keys = opened.keys()
        for key in keys:
            tensor = opened.get_tensor(key)
            if not is_quantized(key):
                yield key, tensor
                continue
            parts = FORMATS[quantization].quantize(tensor)
            yield from _NAMED[quantization](key, tensor, parts)


Named = Iterator[tuple[str, torch.Tensor]]


def _as_bitsandbytes(key: str, weight: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> Named:
    state = {
        "quant_type": "nf4",
        "blocksize": NF4().block_size,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    yield key, parts[0]
    yield f"{key}.absmax", parts[1]
    yield f"{key}.quant_map", parts[2].clone()  # because a file has no two names for one memory
    said = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    yield f"{key}.quant_state.bitsandbytes__nf4", said


def _with_scale(
    suffixes: tuple[str, str], key: str, weight: torch.Tensor, parts: tuple[torch.Tensor, ...]
) -> Named:
    for suffix, part in zip(suffixes, parts, strict=True):
        yield key + suffix, part


_NAMED: dict[str, Callable[[str, torch.Tensor, tuple[torch.Tensor, ...]], Named]] = {
    "nf4": _as_bitsandbytes,
    "fp8": partial(_with_scale, ("", "_scale_inv")),
    "int8": partial(_with_scale, ("", "_scale")),
    "mxfp4": partial(_with_scale, ("_blocks", "_scales")),
}


def _save(tensors: Tensors, target: Path) -> None:
    beside = target.with_suffix(".part")
    try:
        save_file(tensors, beside, metadata={"format": "pt"})
        _keep(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _write(target: Path, content: bytes) -> None:
    beside = target.with_suffix(".part")
    beside.write_bytes(content)
    _keep(beside, target)


def _keep(beside: Path, target: Path) -> None:
    """Gives the file its name once it is on the disk, and the folder too."""
    for path, then in ((beside, lambda: beside.replace(target)), (target.parent, lambda: None)):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
        then()
