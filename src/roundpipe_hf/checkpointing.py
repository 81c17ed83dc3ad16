"""Masters in a Trainer checkpoint: one more file beside optimizer.pt, which stays what a plain Trainer writes.

Only masters that the saved weights do not contain are written: with fp32 weights and fp32 masters there are none.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError

MASTERS_NAME = "roundpipe_masters.pt"
_OPTIMIZER_NAME = "optimizer.pt"

logger = logging.getLogger(__name__)


def save_masters(engine: RoundPipe, folder: str | Path) -> None:
    """Writes the masters that are finer than the weights; the file appears whole or not at all.

    The engine must be flushed. `torch.save` streams tensor after tensor, so no second copy is made in memory.
    """
    masters = {name: master.detach() for name, master in _finer_masters(engine).items()}
    if not masters:
        return
    path = Path(folder) / MASTERS_NAME
    unfinished = path.with_suffix(".unfinished")
    torch.save(masters, unfinished)
    os.replace(unfinished, path)


def load_masters(engine: RoundPipe, folder: str | Path) -> None:
    """Restores the masters of a checkpoint whose weights are in the model already."""
    masters = _finer_masters(engine)
    path = Path(folder) / MASTERS_NAME
    if path.is_file():
        _copy_into(masters, torch.load(path, mmap=True, map_location="cpu", weights_only=True), path)
    elif masters and (Path(folder) / _OPTIMIZER_NAME).is_file():
        logger.warning(
            "%s has an optimizer state but no %s, as a plain Trainer leaves it: the optimizer goes on from the saved "
            "weights, which are coarser than its own copies were",
            folder,
            MASTERS_NAME,
        )


def _finer_masters(engine: RoundPipe) -> dict[str, nn.Parameter]:
    weights = dict(engine.model.named_parameters())
    return {name: master for name, master in engine.optim_named_parameters() if master.dtype != weights[name].dtype}


@torch.no_grad()
def _copy_into(masters: Mapping[str, nn.Parameter], saved: Mapping[str, torch.Tensor], path: Path) -> None:
    missing = sorted(masters.keys() - saved.keys())
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of {len(masters)} parameters that train now ({', '.join(missing[:3])}); "
            "resume with the same trainable parameters"
        )
    for name, master in masters.items():
        master.copy_(saved[name])
