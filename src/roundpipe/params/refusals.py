"""Parameters that cannot be staged, or would silently be trained otherwise, are refused by name."""

from collections.abc import Sequence

import torch
from torch import nn

from ..errors import ConfigError
from ..quantized import QuantizedWeight


def refuse_kind(what: str, parameter: nn.Parameter, device: str) -> None:
    """Raises ConfigError for a parameter of another class, one that is quantized and trains, or one
    that is not on ``device``."""
    is_quantized = isinstance(parameter, QuantizedWeight)
    if type(parameter) is not nn.Parameter and not is_quantized:
        raise ConfigError(
            f"{what} is a {type(parameter).__name__}; only plain nn.Parameter and QuantizedWeight "
            "can be staged"
        )
    if is_quantized and parameter.requires_grad:
        raise ConfigError(
            f"{what} is quantized and trains; freeze it with requires_grad_(False) and train an "
            "adapter, or replace it by its dequantize()"
        )
    if parameter.device.type != device:
        raise ConfigError(f"{what} is on {parameter.device}; keep the model on the CPU")


def refuse_overlaps(layers: Sequence[nn.Module]) -> None:
    """Raises ConfigError for a parameter that trains and lies in another one's memory: each would
    get a master of its own, and they would part."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if _is_one_piece(parameter):
                found.setdefault(id(parameter), (f"layer {index}'s parameter {name!r}", parameter))
    places = {key: place for place, key in enumerate(found)}
    end, before, holder = 0, "", nn.Parameter(torch.empty(0), requires_grad=False)
    pairs = []
    for what, parameter in sorted(found.values(), key=lambda pair: pair[1].data_ptr()):
        begin = parameter.data_ptr()
        if begin < end and (parameter.requires_grad or holder.requires_grad):
            pairs.append((places[id(parameter)], what, parameter, before, holder))
        if begin + parameter.nbytes > end:
            end, before, holder = begin + parameter.nbytes, what, parameter
    if pairs:
        # The first in the model, wherever the allocator has put them.
        _, what, parameter, before, holder = min(pairs, key=lambda pair: pair[0])
        raise ConfigError(
            f"{what} {tuple(parameter.shape)} lies in the memory of {before} "
            f"{tuple(holder.shape)} and is another parameter, so they would be trained apart; "
            "give both one nn.Parameter, or memory of their own (with PEFT: leave out "
            "ensure_weight_tying, or use modules_to_save with it)"
        )


def _is_one_piece(parameter: nn.Parameter) -> bool:
    """Says whether its elements are all that lies from its first to its last. Columns of a matrix
    lie between those of others, and share nothing."""
    if isinstance(parameter, QuantizedWeight) or parameter.is_meta or not parameter.numel():
        return False
    return parameter.is_contiguous() or (parameter.ndim > 1 and parameter.mT.is_contiguous())
