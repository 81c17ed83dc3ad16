"""What a layer says to its own recompute, for layers whose forward is not repeatable: routing,
data-dependent shapes.

Knows one layer run at a time, that of the calling thread; who keeps the data in between is the
executor's business.
"""

import threading
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ConfigError
from ..transfer.boundaries import copied


class LayerRun:
    """One run of a layer in a call that will have a backward.

    ``recalled``: what the forward saved, if this is the recompute and it saved something.
    ``is_kept``: there will be a recompute, so that what is saved is to be kept.
    """

    def __init__(
        self, *, is_recompute: bool, recalled: tuple[Any, ...] | None = None, is_kept: bool = False
    ) -> None:
        self.is_recompute = is_recompute
        self.recalled = recalled
        self.saved: tuple[Any, ...] | None = None
        self._is_kept = is_kept
        self._has_saved = False

    def save(self, data: tuple[Any, ...]) -> None:
        if self._has_saved:
            raise ConfigError(
                "save_for_recompute was called twice in one layer; save everything in one call"
            )
        for leaf in pytree.tree_leaves(data):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise ConfigError(
                    f"save_for_recompute got a tensor of shape {tuple(leaf.shape)} that requires "
                    "grad, which the recompute would cut off from its graph; save what it was "
                    "chosen by (indices, a mask), or its detach()"
                )
        self._has_saved = True
        if self._is_kept:
            # Copied, because the layer may go on writing to it, and a slot will hold other weights.
            self.saved = pytree.tree_map(copied, data)


class _Here(threading.local):
    run: LayerRun | None = None


_here = _Here()


class Running:
    """The calling thread runs a layer; None: in a call without grad, which nothing is saved in."""

    def __init__(self, run: LayerRun | None) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._before, _here.run = _here.run, self._run

    def __exit__(self, *error: object) -> None:
        _here.run = self._before


def save_for_recompute(*data: Any) -> None:
    """Saves what the recompute of this layer must not find out anew, such as the experts that
    tokens were sent to.

    To be called in the forward of a layer, at most once per run of a layer of the sequence, however
    deep inside it. ``data`` are tensors of any shape, containers of them, and plain values; tensors
    are copied. Does nothing without grad, in a recompute, and outside an engine.

    Raises:
        ConfigError: a tensor requires grad, or the layer has saved already.

    Example:
        >>> def forward(self, hidden):
        ...     if doing_recompute():
        ...         (expert,) = get_recompute_data()
        ...     else:
        ...         expert = self.router(hidden).argmax(-1)
        ...         save_for_recompute(expert)
        ...     return self.experts(hidden, expert)
    """
    run = _here.run
    if run is not None and not run.is_recompute:
        run.save(data)


def doing_recompute() -> bool:
    """Returns True while the calling layer runs a second time, for its backward; False outside an
    engine."""
    run = _here.run
    return run is not None and run.is_recompute


def get_recompute_data() -> tuple[Any, ...]:
    """Returns what this layer gave to `save_for_recompute` in its forward, as a tuple, with the
    shapes it had then and on the device that recomputes.

    Raises:
        ConfigError: this is no recompute, or nothing was saved.
    """
    run = _here.run
    if run is None or not run.is_recompute:
        raise ConfigError(
            "get_recompute_data was called outside a recompute; ask doing_recompute() first"
        )
    if run.recalled is None:
        raise ConfigError(
            "this layer's forward did not call save_for_recompute, so there is nothing to get"
        )
    return run.recalled


for _function in (save_for_recompute, doing_recompute, get_recompute_data):
    # What they answer changes from run to run: a compiled layer must ask, not remember.
    # `torch.compiler.disable` says the same but loads the whole compiler, which importing an engine
    # must not.
    setattr(_function, "_torchdynamo_disable", True)  # noqa: B010
