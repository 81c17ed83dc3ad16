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

Names are the model's, so that nothing depends on devices, stages or how memory is pinned. Sharded,
it is a folder with the same keys; see [Note: shards].
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ..errors import ConfigError
from ..optim import GradScaler, OptimizerCtx
from ..quantized import QuantizedWeight
from .base import Engine
from .checkpoints import (
    REST,
    open_checkpoint,
    packed,
    random_state,
    refused_alike,
    replace,
    set_random_state,
    unpacked,
    writable,
)
from .optimizer_files import (
    Optimizers,
    as_sequence,
    check_optimizers,
    describe,
    refuse_other_names,
    restore,
    together,
)


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Engine,
    optimizer: Optimizers,
    scaler: GradScaler | None = None,
    *,
    sharded: bool = False,
) -> None:
    """Writes a checkpoint, one file; it appears whole or not at all, also if the process is killed.

    A synchronisation point: waits for everything, so every step called so far is in it. Gradients
    not yet stepped are not: save after ``step`` (and after ``scaler.update()``). Tensors are
    written from where they are, without a copy. Of several processes all call this: the first one
    gathers what the others have in its memory, and writes the file that a single one would.

    Args:
        path: the file; one of the same name is replaced at the end.
        model: the engine, whose weights and persistent buffers are saved by the original names.
        optimizer: over the engine's masters; or several.
        scaler: the loss scale, where fp16 needs one.
        sharded: write a folder in the format of ``torch.distributed.checkpoint``, to which each
            process writes what it owns, where all of it is too much for one process's memory or
            for one file. All have to see the folder. One that is there is not replaced.

    Raises:
        ConfigError: ``path`` is a folder (``sharded``: is there already), an optimizer is over
            other parameters, here or in another process, or there is too little room on the disk;
            nothing was written.
        OSError: the disk ran full; what was at ``path`` is still there.

    Example:
        >>> roundpipe.save_checkpoint("step-1000.safetensors", engine, optimizer)
        >>> roundpipe.load_checkpoint("step-1000.safetensors", engine, optimizer)
    """
    target, ranks = Path(path), model.ranks
    what = f"saving a {'sharded ' * sharded}checkpoint"
    with OptimizerCtx(), refused_alike(ranks, what, f" to {target}"):
        weights, fixed = _model_tensors(model)  # raises what has failed behind the caller's back
        if sharded and target.exists():
            raise ConfigError(f"{target} is there already; name a folder that is not, or remove it")
        if target.is_dir():
            raise ConfigError(f"{target} is a folder; name the file to write, or give sharded=True")
        masters = dict(model.optim_named_parameters())
        own: dict[str, torch.Tensor] = {
            f"master/{name}": master
            for name, master in masters.items()
            if _holds_more(master, weights[name])
        }
        described = []
        for each in as_sequence(optimizer):
            of_one, state = describe(each, masters)
            described.append(of_one)
            own |= state
        extra = {
            name: value
            for name, value in model.state_dict().items()
            if not isinstance(value, torch.Tensor)
        }
        generators, others = random_state(model)
    told = described, (generators, others)
    # Buffers are the first one's, and so is what nobody trains or has assigned.
    of_model = {
        f"model/{name}": weight
        for name, weight in weights.items()
        if not sharded or ranks.owns(weight)  # type: ignore[arg-type]
    }
    if not sharded or ranks.rank == 0:
        of_model |= fixed
    found = ranks.gathered({} if sharded else own, told)
    with ranks.agreeing("writing the checkpoint"):
        if found is None and not sharded:
            return
        tensors = own if sharded else {}
        if found is not None:
            gathered, all_told = found
            rest: dict[str, Any] = {
                "model": extra,
                "scaler": scaler.state_dict() if _is_on(scaler) else None,
                "rng": others,
                "optimizers": together([optimizers for optimizers, _ in all_told]),
                "rng_of_others": [of_rank for _, of_rank in all_told[1:]],
            }
            tensors |= gathered | generators | {REST: packed(rest)}
        tensors = {key: writable(tensor) for key, tensor in (of_model | tensors).items()}
        if found is not None and not sharded:
            replace(target, tensors)
    if sharded:
        from .checkpoints.shards import write_shards  # late, as it takes long to import

        write_shards(target, tensors, ranks)


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
        path: the file, or the folder of a sharded one.
        model, optimizer, scaler: made as for the run that saved; what they hold is overwritten,
            except quantized weights, which cannot be written and have to be those of the file.

    Raises:
        ConfigError: the file does not fit them, here or in another process; says which names or
            shapes. Nothing was changed.
    """
    source, ranks = Path(path), model.ranks
    with ExitStack() as opened:
        with OptimizerCtx(), refused_alike(ranks, "loading a checkpoint", f" from {path}"):
            weights, fixed = _model_tensors(model)  # raises what has failed behind our back
            file = opened.enter_context(open_checkpoint(source))
            masters = dict(model.optim_named_parameters())
            optimizers = as_sequence(optimizer)
            rest = unpacked(file.get_tensor(REST))
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
        # loading the master gives both; another rank's master is that weight. Tensors of a file are
        # maps of it so far.
        with ranks.agreeing("loading the checkpoint"):
            loaded = {
                name: file.get_tensor(
                    f"master/{name}"
                    if f"master/{name}" in keys and ranks.owns(weight)  # type: ignore[arg-type]
                    else f"model/{name}"
                )
                for name, weight in weights.items()
            }
            model.load_state_dict(loaded | rest["model"], strict=False)
            del loaded  # because those of shards are in memory
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
            if ranks.rank < len(random_states):  # else there were fewer then
                set_random_state(model, *random_states[ranks.rank])


def consolidate_checkpoint(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Makes the one file of a sharded checkpoint that ``save_checkpoint`` would have written
    without ``sharded``. Called by one process, which needs no engine.

    Tensors lie in a file of their own beside ``path`` meanwhile, not in memory, so that the disk
    needs room for twice their bytes.

    Args:
        folder: the sharded checkpoint, which stays as it is.
        path: the file; one of the same name is replaced at the end.

    Raises:
        ConfigError: ``folder`` is no whole sharded checkpoint, ``path`` is a folder, or there is
            too little room on its disk; nothing was written.
        OSError: the disk ran full; there is no new file.

    Example:
        >>> roundpipe.consolidate_checkpoint("step-1000", "step-1000.safetensors")
    """
    source, target = Path(folder), Path(path)
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; name the file to write")
    if not source.is_dir():
        raise ConfigError(f"{source} is no folder; name that of a sharded checkpoint")
    from .checkpoints.shards import mapped_copies  # late, as it takes long to import

    with open_checkpoint(source) as shards, mapped_copies(shards, target) as tensors:
        replace(target, tensors)


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
