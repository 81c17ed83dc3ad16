"""What a Trainer checkpoint holds besides a plain Trainer's files, which stay what they are and
load there.

Masters are written only if the saved weights do not contain them: with fp32 weights and fp32
masters there are none. Generators are written only for devices that have one of their own.
"""

import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import torch
from torch import nn

from roundpipe import OptimizerCtx, RoundPipe
from roundpipe.engine.checkpoints import REST, packed, refused_alike, unpacked, writable
from roundpipe.engine.optimizer_files import check_optimizers, describe, restore, together
from roundpipe.errors import ConfigError
from roundpipe.system.disk import free_bytes, is_full

from ..compat import OPTIMIZER_NAME

MASTERS_NAME = "roundpipe_masters.pt"
SHARDS_NAME = "roundpipe_optimizer"  # a folder
RNG_NAME = "roundpipe_rng_state"
# Nobody takes it for a checkpoint, and Trainer uploads no name that begins like that.
UNFINISHED_NAME = "_unfinished"

logger = logging.getLogger(__name__)


@contextmanager
def whole_folder(
    path: str | Path, *, is_owner: bool = True, wait: Callable[[], None] = lambda: None
) -> Iterator[str]:
    """A folder to make ``path`` in, under the same name. It then appears whole, or not at all if
    the process dies.

    What was at ``path`` is replaced. Only one such folder may be under way next to it.

    Args:
        is_owner: whether this is the one process of those that write together which makes and
            renames folders.
        wait: waits for the others.

    Raises:
        OSError: the disk is full. What was written is gone; what was at ``path`` is still there.
    """
    unfinished = Path(path).parent / UNFINISHED_NAME
    if is_owner:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
    wait()
    try:
        yield str(unfinished)
        wait()
        if is_owner:
            made = unfinished / Path(path).name
            _put_on_disk(made)
            if os.path.isdir(path):
                os.rename(path, unfinished / "replaced")
            os.rename(made, path)
    except Exception as error:
        if not is_owner or not is_full(error, unfinished):
            raise
        written = sum(file.stat().st_size for file in unfinished.rglob("*") if file.is_file())
        shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(
            ENOSPC,
            f"No space left on the disk of {unfinished.parent} when {written} bytes of "
            f"{Path(path).name} were written ({free_bytes(unfinished)} are free without them); "
            "make room, or keep fewer checkpoints (save_total_limit), and resume from the last one",
        ) from error
    finally:
        if is_owner:
            shutil.rmtree(unfinished, ignore_errors=True)
    wait()


def _put_on_disk(folder: Path) -> None:
    """Because a name may otherwise get there before what it stands for."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def save_masters(engine: RoundPipe, folder: str | Path, *, is_owner: bool = True) -> None:
    """Writes the masters that are finer than the weights, if this process ``is_owner`` of the
    files; the others send it theirs.

    The engine must be flushed. `torch.save` streams tensor after tensor, so no second copy is made
    in memory, but of what other processes have.
    """
    own = {name: master.detach() for name, master in _finer_masters(engine).items()}
    masters, _ = engine.ranks.gathered(own, None) or ({}, None)
    if masters and is_owner:
        torch.save(masters, Path(folder) / MASTERS_NAME)


def load_masters(engine: RoundPipe, folder: str | Path) -> None:
    """Restores the masters of a checkpoint whose weights are in the model already."""
    masters = _finer_masters(engine)
    path = Path(folder) / MASTERS_NAME
    if path.is_file():
        _copy_into(
            masters, torch.load(path, mmap=True, map_location="cpu", weights_only=True), path
        )
    elif masters and (Path(folder) / OPTIMIZER_NAME).is_file():
        logger.warning(
            "%s has an optimizer state but no %s, as a plain Trainer leaves it: the optimizer goes "
            "on from the saved weights, which are coarser than its own copies were",
            folder,
            MASTERS_NAME,
        )


def save_shards(engine: RoundPipe, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Each process writes the state of the optimizer that it owns, and the masters that are finer
    than the weights. All call it, with the engine flushed."""
    from roundpipe.engine.checkpoints.shards import write_shards  # late, as it takes long to import

    ranks = engine.ranks
    with OptimizerCtx():
        described, own = describe(optimizer, dict(engine.optim_named_parameters()))
        own |= {f"master/{name}": master for name, master in _finer_masters(engine).items()}
        found = ranks.gathered({}, described)
        if found is not None:
            own[REST] = packed({"optimizers": together([[each] for each in found[1]])})
        write_shards(
            Path(folder) / SHARDS_NAME, {key: writable(one) for key, one in own.items()}, ranks
        )


def has_shards(folder: str | Path) -> bool:
    return (Path(folder) / SHARDS_NAME).is_dir()


def load_shards(engine: RoundPipe, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Restores what this process owns of a checkpoint whose weights are in the model already. All
    call it.

    Raises:
        ConfigError: they do not fit, here or in another process; nothing was changed.
    """
    from roundpipe.engine.checkpoints.shards import Shards  # late, as it takes long to import

    path = Path(folder) / SHARDS_NAME
    masters, finer = dict(engine.optim_named_parameters()), _finer_masters(engine)
    with OptimizerCtx(), refused_alike(engine.ranks, "loading shards", f" from {path}"):
        shards = Shards(path)
        (described,) = unpacked(shards.get_tensor(REST))["optimizers"]
        check_optimizers(f"{path}", [described], [optimizer], masters)
        names = shards.keys()
        saved = {name.removeprefix("master/") for name in names if name.startswith("master/")}
        if not saved:  # the saved weights were as fine
            finer = {}
        _refuse_missing(finer, saved, path)
    with engine.ranks.agreeing("loading shards"), OptimizerCtx(), torch.no_grad():
        keys = defaultdict[str, list[str]](list)
        for key in names:
            if key.startswith("optimizer/"):
                keys[key.removeprefix("optimizer/").rpartition("/")[0]].append(key)
        restore(optimizer, described, masters, shards, keys)
        for name, master in finer.items():
            master.copy_(shards.get_tensor(f"master/{name}"))


def save_device_rng(engine: RoundPipe, path: Path) -> None:
    """Writes the generators of the engine's devices, by the devices' names."""
    states = {
        device.name: device.rng_state()
        for device in engine.devices
        if not device.shares_generator()
    }
    if states:
        torch.save(states, path)


def load_device_rng(engine: RoundPipe, path: Path) -> None:
    """Restores the generators of those devices that the checkpoint knows by name."""
    states = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {}
    for device in engine.devices:
        if device.name in states:
            device.set_rng_state(states[device.name])


def _finer_masters(engine: RoundPipe) -> dict[str, nn.Parameter]:
    weights = dict(engine.model.named_parameters())
    return {
        name: master
        for name, master in engine.optim_named_parameters()
        if master.dtype != weights[name].dtype
    }


@torch.no_grad()
def _copy_into(
    masters: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor], path: Path
) -> None:
    _refuse_missing(masters, saved, path)
    for name, master in masters.items():
        master.copy_(saved[name])


def _refuse_missing(masters: Mapping[str, nn.Parameter], saved: Iterable[str], path: Path) -> None:
    missing = sorted(masters.keys() - set(saved))
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of {len(masters)} parameters that train now "
            f"({', '.join(missing[:3])}); resume with the same trainable parameters"
        )
