"""Calls of an engine as training and evaluation make them, for both kinds.

A model that runs in parts has no round of its own: its batches go forward and backward whole, one
after the other, and each part cuts them for itself. So nothing has to be known of its loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig

from .out_of_memory import Footprint

# Arguments by position (none), by name, and the label: what `forward_backward(microbatches=)`
# takes.
Microbatch = tuple[tuple[()], dict[str, Any], Any]
LossFn = Callable[[Any, Any], Sequence[torch.Tensor]]


def num_cut(engine: RoundPipe | AutoRoundPipe, footprint: Footprint) -> int:
    """Into how many microbatches a batch is to be cut before ``engine`` gets it."""
    return 1 if isinstance(engine, AutoRoundPipe) else footprint.num_microbatch


def run_config(engine: RoundPipe | AutoRoundPipe, footprint: Footprint) -> RoundPipeRunConfig:
    """How a call keeps to ``footprint``."""
    config = footprint.run_config()
    return (
        replace(config, num_microbatch=footprint.num_microbatch)
        if isinstance(engine, AutoRoundPipe)
        else config
    )


def forward_backward(
    engine: RoundPipe | AutoRoundPipe,
    microbatches: Sequence[Microbatch],
    loss_fn: LossFn,
    footprint: Footprint,
) -> list[torch.Tensor]:
    """`RoundPipe.forward_backward`, of which ``loss_fn`` returns a sequence: the sums of the
    microbatches' losses."""
    config = run_config(engine, footprint)
    if not isinstance(engine, AutoRoundPipe):
        losses: list[torch.Tensor] = engine.forward_backward(
            microbatches=microbatches, loss_fn=loss_fn, run_config=config
        )
        return losses
    totals: list[torch.Tensor] = []
    for args, kwargs, label in microbatches:
        parts = loss_fn(engine(*args, roundpipe_run_config=config, **kwargs), label)
        torch.stack(list(parts)).sum().backward()
        totals = _added(totals, parts)
    return totals


def forward_loss(
    engine: RoundPipe | AutoRoundPipe,
    microbatches: Sequence[Microbatch],
    loss_fn: LossFn,
    footprint: Footprint,
) -> list[torch.Tensor]:
    """`RoundPipe.forward_loss`: the same sums, without gradients and at the newest weights."""
    if not isinstance(engine, AutoRoundPipe):
        losses: list[torch.Tensor] = engine.forward_loss(microbatches=microbatches, loss_fn=loss_fn)
        return losses
    totals: list[torch.Tensor] = []
    with torch.no_grad():
        for args, kwargs, label in microbatches:
            outputs = engine(*args, roundpipe_run_config=run_config(engine, footprint), **kwargs)
            totals = _added(totals, loss_fn(outputs, label))
    return totals


def _added(totals: list[torch.Tensor], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    detached = [part.detach() for part in parts]
    return (
        [total + part for total, part in zip(totals, detached, strict=True)] if totals else detached
    )
