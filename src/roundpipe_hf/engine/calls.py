"""Calls of an engine as training and evaluation make them."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig

from .out_of_memory import Footprint

# Arguments by position (none), by name, and the label: what `forward_backward(microbatches=)`
# takes.
Microbatch = tuple[tuple[()], dict[str, Any], Any]
LossFn = Callable[[Any, Any], Sequence[torch.Tensor]]
_layers: WeakKeyDictionary[RoundPipe | AutoRoundPipe, int] = WeakKeyDictionary()


def num_layers(engine: RoundPipe | AutoRoundPipe) -> int:
    """How many layers run on devices. It stays what it was when the engine was made, so the
    statistics, which walk all weights, are asked once."""
    if engine not in _layers:
        _layers[engine] = engine.statistics()["layers"]
    return _layers[engine]


def cuts_batches(engine: RoundPipe | AutoRoundPipe) -> bool:
    """Whether ``engine`` can be given a whole batch to cut, and puts its outputs together again.

    Not a module that is no sequence, of which nobody knows how to merge its loss.
    """
    if isinstance(engine, AutoRoundPipe):
        return True  # each part cuts for itself
    return num_layers(engine) > 1


def run_config(
    engine: RoundPipe | AutoRoundPipe, footprint: Footprint, device: torch.device | None = None
) -> RoundPipeRunConfig:
    """How a call on a whole batch keeps to ``footprint``. Its outputs go to ``device``, else to
    the host."""
    return RoundPipeRunConfig(
        num_microbatch=footprint.num_microbatch if cuts_batches(engine) else 1,
        recompute_grain=footprint.recompute_grain,
        keep_graphs=footprint.keeps_graphs,
        output_device=device,
    )
