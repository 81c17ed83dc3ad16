"""Random numbers that a layer draws past torch's default generators, which its recompute would draw
anew."""

import random
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..device.generators import state_of
from ..errors import ConfigError


class Source(NamedTuple):
    """Something to draw from. ``state`` changes with every draw; ``is_shared``: maybe with those of
    other threads."""

    name: str
    state: Callable[[], Any]
    is_shared: bool = False


def sources_of(modules: Iterable[nn.Module]) -> list[Source]:
    """Generators that are attributes of the modules, and those of Python and NumPy."""
    found = [Source("Python's random module", random.getstate, is_shared=True)]
    numpy = sys.modules.get("numpy")  # if nobody has imported it, nobody draws from it
    if numpy is not None:
        found.append(
            Source(
                "NumPy's global generator",
                lambda: _comparable(numpy.random.get_state()),
                is_shared=True,
            )
        )
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Generator):
                found.append(Source(f"its {name}", partial(_torch_state, value)))
            elif isinstance(value, random.Random):
                found.append(Source(f"its {name}", value.getstate))
            elif numpy is not None and isinstance(value, numpy.random.Generator):
                found.append(Source(f"its {name}", partial(_numpy_state, value)))
    return found


class OwnDraws:
    """What was drawn from ``sources`` since it was made."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = [(source, source.state()) for source in sources]

    def refuse(self, layer: str | None) -> None:
        """Raises ConfigError if something was drawn; only warns if that may have been another
        thread."""
        for source, before in self._before:
            if source.state() == before:
                continue
            text = (
                f"layer {layer} draws random numbers from {source.name}, and its recompute would "
                "draw others; draw from torch's default generator, or save what was drawn with "
                "roundpipe.save_for_recompute"
            )
            if not source.is_shared:
                raise ConfigError(text)
            warnings.warn(text, stacklevel=2)


def _torch_state(generator: torch.Generator) -> Any:
    return _comparable(state_of(generator))


def _numpy_state(generator: Any) -> Any:
    return _comparable(generator.bit_generator.state)


def _comparable(state: Any) -> Any:
    """A generator's state without arrays, which cannot be compared as a whole."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_comparable, state))
    if isinstance(state, torch.Tensor):
        state = state.numpy()
    return state.tobytes() if hasattr(state, "tobytes") else state
