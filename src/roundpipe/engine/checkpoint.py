"""One file with all that training goes on from: weights, masters, optimizer state, loss scale,
random numbers.

[Note: checkpoint file] A safetensors file, so that reading and writing map memory instead of
copying it. Its keys:

    model/NAME            parameters (tied ones once) and persistent buffers, by their names in the
                          original model
    master/NAME           the optimizer's own copy, where it is wider than the weight and so
                          holds more
    optimizer/NAME/KEY    tensors of the optimizer's state for that parameter, in their own dtype
    rng/...               generators of torch
    rest                  what is no tensor: hyper-parameters, the loss scale and others, packed by
                          ``torch.save``

Names are the model's, so that nothing depends on devices, stages or how memory is pinned.
"""

import io
import os
import pickle
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import safetensors
import torch
from safetensors.torch import save_file

from ..device.generators import state_of
from ..errors import ConfigError
from ..optim import GradScaler, OptimizerCtx
from ..quantized import QuantizedWeight
from .base import Engine
from .optimizer_files import (
    Optimizers,
    as_sequence,
    check_optimizers,
    describe,
    refuse_other_names,
    restore,
    together,
)

_FORMAT = {"format": "roundpipe", "version": "1"}
_REST = "rest"


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Engine,
    optimizer: Optimizers,
    scaler: GradScaler | None = None,
) -> None:
    """Writes a checkpoint file; it appears whole or not at all, also if the process is killed.

    A synchronisation point: waits for everything, so every step called so far is in it. Gradients
    not yet stepped are not: save after ``step`` (and after ``scaler.update()``). Tensors are
    written from where they are, without a copy. Of several processes all call this: the first one
    gathers what the others have in its memory, and writes the file that a single one would.

    Args:
        path: the file; one of the same name is replaced at the end.
        model: the engine, whose weights and persistent buffers are saved by the original names.
        optimizer: over the engine's masters; or several.
        scaler: the loss scale, where fp16 needs one.

    Raises:
        ConfigError: ``path`` is a folder, or an optimizer is over other parameters; nothing was
            written.

    Example:
        >>> roundpipe.save_checkpoint("step-1000.safetensors", engine, optimizer)
        >>> roundpipe.load_checkpoint("step-1000.safetensors", engine, optimizer)
    """
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name the file to write")
    weights, fixed = _model_tensors(model)
    tensors = {f"model/{name}": tensor for name, tensor in weights.items()} | fixed
    with OptimizerCtx():
        masters = dict(model.optim_named_parameters())
        own: dict[str, torch.Tensor] = {
            f"master/{name}": master
            for name, master in masters.items()
            if _holds_more(master, weights[name])
        }
        extra = {
            name: value
            for name, value in model.state_dict().items()
            if not isinstance(value, torch.Tensor)
        }
        described = []
        for each in as_sequence(optimizer):
            of_one, state = describe(each, masters)
            described.append(of_one)
            own |= state
        random_state = _random_state(model)
        rest: dict[str, Any] = {
            "model": extra,
            "scaler": scaler.state_dict() if _is_on(scaler) else None,
            "rng": random_state[1],
        }
        found = model.ranks.gathered(own, (described, random_state))
        with model.ranks.agreeing("writing the checkpoint"):
            if found is None:
                return
            gathered, told = found
            rest["optimizers"] = together([optimizers for optimizers, _ in told])
            rest["rng_of_others"] = [of_rank for _, of_rank in told[1:]]
            tensors |= gathered | random_state[0]
            tensors[_REST] = _packed(rest)
            _replace(target, {key: _writable(tensor) for key, tensor in tensors.items()})


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Engine,
    optimizer: Optimizers,
    scaler: GradScaler | None = None,
) -> None:
    """Restores what ``save_checkpoint`` wrote, for any number of devices, plan and ``pin_model``.

    A synchronisation point; drops accumulated gradients. Training goes on to the bit as after the
    save. Of several processes, also of another number of them, each calls this and takes its share.

    Args:
        path: the file.
        model, optimizer, scaler: made as for the run that saved; what they hold is overwritten,
            except quantized weights, which cannot be written and have to be those of the file.

    Raises:
        ConfigError: the file does not fit them; says which names or shapes. Nothing was changed.
    """
    with safetensors.safe_open(str(path), "pt") as file:
        if file.metadata() != _FORMAT:
            raise ConfigError(
                f"{path} has metadata {file.metadata()}, not {_FORMAT}: it was not written by this "
                "version's save_checkpoint(); its weights can be loaded with load_state_dict()"
            )
        weights, fixed = _model_tensors(model)
        with OptimizerCtx():
            masters = dict(model.optim_named_parameters())
        optimizers = as_sequence(optimizer)
        rest = _unpacked(file.get_tensor(_REST))
        keys = set(file.keys())
        _check_weights(f"{path}", file, keys, weights)
        _check_quantized(f"{path}", file, keys, fixed)
        check_optimizers(f"{path}", rest["optimizers"], optimizers, masters)
        if (rest["scaler"] is not None) != _is_on(scaler):
            saved = "without" if rest["scaler"] is None else "with"
            raise ConfigError(
                f"{path} was saved {saved} an enabled GradScaler; load it the same way"
            )

        # From here on nothing is refused any more. The weight is its master rounded, so that
        # loading the master gives both. Tensors are maps of the file so far.
        finest = {
            name: f"master/{name}" if f"master/{name}" in keys else f"model/{name}"
            for name in weights
        }
        loaded = {name: file.get_tensor(key) for name, key in finest.items()}
        model.load_state_dict(loaded | rest["model"], strict=False)
        with OptimizerCtx():
            by_name: dict[str, list[str]] = {}
            for key in keys:
                if key.startswith("optimizer/"):
                    by_name.setdefault(
                        key.removeprefix("optimizer/").rpartition("/")[0], []
                    ).append(key)
            for each, described in zip(optimizers, rest["optimizers"], strict=True):
                restore(each, described, masters, file, by_name)
        if _is_on(scaler):
            scaler.load_state_dict(rest["scaler"])
        generators = {key: file.get_tensor(key) for key in keys if key.startswith("rng/")}
        random_states = [(generators, rest["rng"]), *rest.get("rng_of_others", ())]
        if model.ranks.rank < len(random_states):  # else there were fewer then
            _set_random_state(model, *random_states[model.ranks.rank])


def _is_on(scaler: GradScaler | None) -> TypeGuard[GradScaler]:
    return scaler is not None and scaler.is_enabled()


# The model.


def _model_tensors(model: Engine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and persistent buffers by their first name, every update in them; not copies. And
    the parts of quantized weights, by the keys of the file."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    fixed: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, QuantizedWeight):
            fixed |= {f"quantized/{name}/{n}": part for n, part in enumerate(value.parts)}
        else:
            tensors[name] = value
    return tensors, fixed


def _holds_more(master: torch.Tensor, weight: torch.Tensor) -> bool:
    return torch.promote_types(master.dtype, weight.dtype) != weight.dtype


def _check_weights(
    path: str, file: Any, keys: set[str], weights: Mapping[str, torch.Tensor]
) -> None:
    saved = {key.removeprefix("model/") for key in keys if key.startswith("model/")}
    refuse_other_names(path, "the model", saved, weights.keys())
    for name, tensor in weights.items():
        shape = tuple(file.get_slice(f"model/{name}").get_shape())
        if shape != tuple(tensor.shape):
            raise ConfigError(
                f"{path} has {name!r} in shape {shape}, the model in shape {tuple(tensor.shape)}"
            )


def _check_quantized(
    path: str, file: Any, keys: set[str], fixed: Mapping[str, torch.Tensor]
) -> None:
    saved = {key for key in keys if key.startswith("quantized/")}
    refuse_other_names(path, "the model's quantized weights", saved, fixed.keys())
    for key, part in fixed.items():
        # By their bytes, because nan is not equal to itself.
        there, here = (tensor.contiguous().view(-1) for tensor in (file.get_tensor(key), part))
        if there.dtype != here.dtype or not torch.equal(
            there.view(torch.uint8), here.view(torch.uint8)
        ):
            raise ConfigError(
                f"{path} has other values of {key!r} than the model, whose quantized weights "
                "cannot be written; load the checkpoint that the run began with"
            )


# Random numbers.


def _random_state(model: Engine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors, and what is none."""
    tensors = {"rng/cpu": state_of(torch.default_generator)}
    for place, device in enumerate(
        device for device in model.devices if not device.shares_generator()
    ):
        tensors[f"rng/device{place}"] = device.rng_state()
    others: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        kind, words, *position = sys.modules["numpy"].random.get_state()
        others["numpy"] = (kind, words.tolist(), *position)
    return tensors, others


def _set_random_state(
    model: Engine, tensors: Mapping[str, torch.Tensor], others: Mapping[str, Any]
) -> None:
    """As far as there are as many devices now as there were."""
    torch.set_rng_state(tensors["rng/cpu"].clone())
    for place, device in enumerate(
        device for device in model.devices if not device.shares_generator()
    ):
        if f"rng/device{place}" in tensors:
            device.set_rng_state(tensors[f"rng/device{place}"].clone())
    random.setstate(others["python"])
    if "numpy" in others and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(others["numpy"])


# The file.


def _packed(rest: dict[str, Any]) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(rest, buffer)
    packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        _unpacked(packed)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            "the optimizer's param groups or state, or the model's extra state, hold something "
            f"that could not be loaded again: {error}"
        ) from error
    return packed


def _unpacked(packed: torch.Tensor) -> dict[str, Any]:
    rest: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return rest


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the file can be written from its memory."""
    dense = tensor.detach().cpu().contiguous()
    # Because counters may be shared, and the tables of quantized weights are, which safetensors
    # refuses.
    return dense.clone() if dense.numel() <= 256 else dense


def _replace(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    """[1] a sibling is written and on the disk, [2] it takes the name, [3] the folder is on the
    disk."""
    unfinished = target.with_name(target.name + ".unfinished")
    try:
        save_file(tensors, unfinished, metadata=_FORMAT)
        _sync(unfinished)
        os.replace(unfinished, target)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
